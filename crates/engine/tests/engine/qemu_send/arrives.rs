//! Pages that arrive.
use proptest::{collection::vec, prelude::*};
use transship_codec::Method as Codec;
use transship_engine::{WhenBusy, ZeroPages};
use transship_memory::{Freeing, PAGE_BYTES, PageCount, WindowPages};

use super::{
    guest::{Guest, VRAM_PAGES, guest},
    model::{Quirk, send},
    wires::{ONE, TWO, Wires, wires},
};
use crate::common::{
    self, History, Op, contents, kind,
    ops::{late, life, op},
};

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the guest wrote and freed while it travelled, in whichever form, and whatever the destination's memory
    /// held before where that is to be cleared.
    #[test]
    fn what_arrives_is_what_the_guest_held(
        wires in wires(), before in vec(op(), 0..40), life in life(15), late in late(), kind in kind(),
    ) {
        let mut guest = Guest::new(wires.machine, life.after);
        guest.inner = guest.inner.with_memory(kind);
        {
            let mut script = guest.inner.script.lock().unwrap();
            before.iter().for_each(|op| common::apply(&guest.inner.memory, op, &mut script.history));
            script.meanwhile = life.before.into();
            script.late = late;
        }
        let (result, report, arrived) = send(&mut guest, wires, Quirk::None);
        prop_assert!(result.is_ok(), "{:?}", result);
        prop_assert!(arrived.ran && guest.given_up && guest.resumed().is_none());
        let blocks: Vec<_> = guest.names().iter().map(|name| arrived.memory[name].clone()).collect();
        prop_assert_eq!(guest.inner.script.lock().unwrap().history.wrong(&guest.inner.memory, &blocks), vec![]);
        let mut vram = vec![0; VRAM_PAGES as usize * PAGE_BYTES];
        vram[2 * PAGE_BYTES..3 * PAGE_BYTES].fill(7);
        prop_assert!(arrived.memory["vga.vram"] == vram);
        // Two lists of blocks, each round, and the last section.
        let barriers = if wires.channels == 0 { 0 } else { 2 + report.rounds.len() + 1 };
        prop_assert_eq!(arrived.barriers, barriers);
    }
}

/// Encoders and channels are any number; what does not shrink, and what found all encoders busy, goes in the form of
/// the method all the same.
#[test]
fn encoders_serve_all_channels_also_with_what_does_not_shrink() {
    let pages = [64 * 128];
    for (compress, channels, encoders, when_busy) in [
        (Codec::Zlib, 2, 3, WhenBusy::Wait),
        (Codec::Zstd, 3, 1, WhenBusy::Wait),
        (Codec::Zlib, 2, 1, WhenBusy::Raw),
        (Codec::Zstd, 1, 2, WhenBusy::Raw),
    ] {
        let wires = Wires { compress, channels, encoders, when_busy, ..ONE };
        let mut guest = Guest::with(&pages, ONE.machine, vec![vec![Op::Fill { region: 0, page: 5, byte: 3 }]]);
        // Else a page that the kernel takes out of our mapping, one in a million, is sent once more.
        guest.freeing = Freeing::Never;
        let mut state = 1_u64;
        for first in (0..pages[0]).step_by(128) {
            let mut noise = vec![0; 128 * PAGE_BYTES];
            for word in noise.chunks_exact_mut(8) {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                word.copy_from_slice(&(state ^ state >> 29).to_le_bytes());
            }
            guest.inner.memory.regions()[0].write_pages(WindowPages::new(first, u128::MAX), &noise).unwrap();
        }
        let (result, report, arrived) = send(&mut guest, wires, Quirk::None);
        result.unwrap();
        assert!(arrived.memory["mem0"] == contents(&guest.inner.memory)[0], "{wires:?}");
        assert_eq!(report.pages.normal, pages[0] + 1, "{wires:?}");
        // Stored pages are no encoder's.
        let encoded = report.pages.normal - report.pages.raw_busy;
        assert_eq!(report.bytes.encoder_in, encoded * PAGE_BYTES as u64, "{wires:?}");
        assert!(when_busy == WhenBusy::Raw || report.pages.raw_busy == 0, "{report:?}");
        assert!(report.cpu.encoders > 0.0, "{report:?}");
    }
}

/// Looking at a hole would make it memory again.
#[test]
fn what_becomes_a_hole_before_its_turn_is_not_read() {
    // Done in the second round, when the first region was looked at already; one of these pages is used again.
    let free = Op::Free { region: 0, first: 10, count: 50 };
    let fill = |page| Op::Fill { region: 0, page, byte: 9 };
    let zstd = Wires { compress: Codec::Zstd, ..TWO };
    let main = Wires { zero_pages: ZeroPages::Main, ..TWO };
    for wires in [ONE, TWO, zstd, main] {
        let mut guest =
            Guest::new(ONE.machine, vec![(0..100).map(fill).collect(), vec![free.clone()], vec![fill(12), fill(80)]]);
        let mut seen = History::new(&[300, 130]);
        (0..100).for_each(|page| common::apply(&guest.inner.memory, &fill(page), &mut seen));
        let (result, report, arrived) = send(&mut guest, wires, Quirk::None);
        result.unwrap();
        assert_eq!(guest.inner.memory.regions()[0].data().unwrap().count(), PageCount::new(50 + 1), "{wires:?}");
        assert!(arrived.memory["mem0"] == contents(&guest.inner.memory)[0], "{wires:?}");
        assert_eq!((report.rounds[0].hole, report.pages.zero), (430 - 100, 0), "{wires:?}: {report:?}");
        assert_eq!((report.rounds[1].hole, report.pages.normal), (50, 100 + 50 + 2), "{wires:?}: {report:?}");
    }
}

/// A device that is not at rest when the guest stands.
#[test]
fn what_is_written_when_the_state_is_saved_arrives_and_is_counted() {
    for wires in [ONE, TWO] {
        let mut guest = guest();
        guest.inner.script.lock().unwrap().late = vec![
            Op::Fill { region: 1, page: 129, byte: 0x99 },
            Op::FillRun { region: 0, first: 126, count: 4, byte: 8 },
        ];
        let (result, report, arrived) = send(&mut guest, wires, Quirk::None);
        result.unwrap();
        assert_eq!(report.late_pages, 5, "{wires:?}");
        let held = contents(&guest.inner.memory);
        assert!(arrived.memory["mem0"] == held[0] && arrived.memory["mem1"] == held[1], "{wires:?}");
    }
}

/// Of the main stream all but what comes before the first round, and the pings, which the rounds are not counted with.
#[test]
fn the_state_counts_as_sent() {
    let mut guest = guest();
    let (result, report, arrived) = send(&mut guest, ONE, Quirk::None);
    result.unwrap();
    let rounds: u64 = report.rounds.iter().map(|round| round.bytes).sum();
    assert_eq!(report.bytes.wire, rounds + arrived.behind_the_rounds);
}

/// A destination that looks for a description finds one.
#[test]
fn a_state_that_is_not_described_gets_a_description() {
    for wires in [ONE, TWO] {
        let mut guest = Guest { describes: false, ..guest() };
        let (result, _, arrived) = send(&mut guest, wires, Quirk::None);
        result.unwrap();
        assert!(arrived.ran && guest.given_up, "{wires:?}");
    }
}
