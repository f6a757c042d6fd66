//! What the QEMU says of it, or does instead.
use std::path::Path;

use transship_engine::{Error, Misfit, Outcome, Progress, Report, Rule, guest::SourceGuest, send_to_qemu};

use super::{
    guest::{Guest, guest},
    model::{Instead, Quirk, send, uri},
    wires::{ONE, TWO, Wires},
};
use crate::common::Scripted;

/// Before the byte that ends the stream, nothing that it says or does can make two guests or none.
#[test]
fn whatever_it_says_before_the_end_the_guest_stays_here() {
    for wires in [ONE, TWO] {
        for ping in 1..=6 {
            for (instead, rule) in [
                (Instead::Shut(1), Some(Rule::Perseverance)),
                (Instead::Shut(0), Some(Rule::Order)),
                (Instead::HangUp, Some(Rule::Stays)),
                (Instead::Pong(77), Some(Rule::Turn)),
                (Instead::Noise, None),
                (Instead::Request, Some(Rule::Turn)),
                (Instead::PongAndShut, Some(Rule::Perseverance)),
                (Instead::DropChannel, Some(Rule::Stays)),
                // Of its silence alone the guest would stand still for a minute before anything was said.
                (Instead::Freeze, Some(Rule::Stays)),
            ] {
                let needs_channels = matches!(instead, Instead::DropChannel | Instead::Freeze);
                // Until the first answer it may still be busy with opening them.
                if needs_channels && wires.channels == 0 || instead == Instead::Freeze && ping == 1 {
                    continue;
                }
                let mut guest = guest();
                let (result, report, arrived) = send(&mut guest, wires, Quirk::AtPing(ping, instead));
                let error = result.expect_err("it goes wrong");
                let story = format!("{instead:?} at ping {ping}, {wires:?}: {error}");
                assert_eq!(error.outcome(), Outcome::NothingLost, "{story}");
                assert_eq!(error.rule(), rule, "{story}");
                assert!(rule.is_some() || matches!(error, Error::Wire { .. }), "{story}");
                assert!(!arrived.ran && !guest.given_up, "{story}");
                assert_eq!(report.error, Some(error.to_string()));
                // Stopped or not, it runs.
                let stopped = guest.inner.script.lock().unwrap().stopped;
                assert_eq!(guest.resumed(), stopped.then_some(true), "{story}");
                assert!(
                    ping > 2 || !stopped,
                    "{story}: what can be refused at the start is refused before it is stopped"
                );
            }
        }
    }
}

/// From that byte on it may run there, so it never runs here without a person.
#[test]
fn whatever_it_says_after_the_end_but_that_it_has_it_needs_a_person() {
    for instead in [Instead::Shut(1), Instead::HangUp, Instead::Pong(77), Instead::Noise] {
        let mut guest = guest();
        let (result, _, _) = send(&mut guest, ONE, Quirk::AtEnd(instead));
        let error = result.expect_err("it goes wrong");
        assert_eq!(error.outcome(), Outcome::NeedsPerson, "{instead:?}: {error}");
        assert!(error.to_string().contains("info status") && error.to_string().contains("resume it"), "{error}");
        assert!(guest.given_up && guest.resumed().is_none(), "{instead:?}");
    }
}

/// The destination has agreed to a machine, and to pages without anything before them.
#[test]
fn a_state_that_is_not_what_was_announced_is_not_sent() {
    let other = Guest { says_machine: Some("pc-q35-9.9"), ..guest() };
    let early = Guest { early: true, ..guest() };
    for mut guest in [other, early] {
        let (result, _, arrived) = send(&mut guest, ONE, Quirk::None);
        let error = result.expect_err("it is something else");
        assert_eq!(error.outcome(), Outcome::NothingLost, "{error}");
        assert_eq!(error.misfit(), Some(Misfit::Machine), "{error}");
        assert!(!arrived.ran && !guest.given_up && guest.resumed() == Some(true), "{error}");
    }
}

#[test]
fn what_can_not_be_sent_is_refused_before_anybody_is_asked() {
    let nobody = uri(Path::new("/nowhere/incoming"));
    let send = |guest: &mut dyn SourceGuest, wires: Wires| {
        send_to_qemu(guest, None, &nobody, &wires.options(), &Progress::new(), &mut Report::default()).unwrap_err()
    };
    let error = send(&mut Scripted::new(&[1], vec![]), ONE);
    assert_eq!(error.misfit(), Some(Misfit::Vmm), "{error}");
    let error = send(&mut Guest::new("microvm", vec![]), TWO);
    assert_eq!(error.misfit(), Some(Misfit::Machine), "{error}");
    let error = send(&mut Guest::new("microvm", vec![]), ONE);
    assert!(matches!(error, Error::Connect { .. }), "{error}");
}
