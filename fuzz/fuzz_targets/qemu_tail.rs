//! What follows the memory, from anybody: told apart or refused; the state of the guest found and changed in its place.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transship_wire::qemu::{GlobalState, RunState, Tail};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(tail) = Tail::parse(bytes, 77) {
        assert!(tail.end <= bytes.len());
        let mut end = 0;
        for section in &tail.sections {
            assert_eq!(section.offset, 77 + end as u64);
            assert!(end < section.body.start && section.body.start <= section.body.end);
            end = section.body.end + 5;
        }
        assert!(end <= tail.end);
    }
    let mut changed = bytes.to_vec();
    if let Ok(Some(mut state)) = GlobalState::find(bytes, 77) {
        for wanted in [RunState::Running, RunState::Paused] {
            state.patch(&mut changed, wanted);
            assert_eq!((&*state.state, state.runs()), (wanted.name(), wanted == RunState::Running));
        }
        let (first, last) = (changed.iter(), bytes.iter());
        assert!(first.zip(last).filter(|(new, old)| new != old).count() <= 36);
        let _ = GlobalState::find(&changed, 77);
    }
});
