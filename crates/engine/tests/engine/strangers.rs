//! Whoever comes beside the source and says nothing, or too little, neither delays nor ends a move.
#![allow(clippy::unwrap_used)]
use std::thread;

use crate::common::{Scripted, Waiting};
use crate::crowd::{Passage, Words};
use transship_engine::{Listener, MoveOptions, Progress, Report, move_guest, receive_guest};
use transship_wire::{Preamble, Role, SessionId};

const PAGES: [u64; 1] = [300];

fn half_a_preamble() -> Vec<u8> {
    Preamble { session: SessionId([3; 16]), role: Role::Control }.encode()[..31].to_vec()
}

/// A move whose connections each come behind a crowd.
fn move_among(first_words: Vec<Words>) {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let passage = Passage::new(listener.uri(), first_words);
    let (mut source, mut waiting) = (Scripted::new(&PAGES, vec![]), Waiting::new(&PAGES));
    thread::scope(|scope| {
        let destination =
            scope.spawn(|| receive_guest(&mut waiting, listener, None, &Progress::new(), &mut Report::default()));
        let options = MoveOptions { channels: 2, ..MoveOptions::default() };
        let moved =
            move_guest(&mut source, None, None, &passage.uri, &options, &Progress::new(), &mut Report::default());
        let received = destination.join().unwrap();
        assert!(moved.is_ok() && received.is_ok(), "{moved:?} {received:?}");
    });
    assert_eq!(waiting.started, Some(true));
    assert!(passage.strangers() >= 3 * 8, "one crowd before each connection");
}

#[test]
fn silent_strangers_do_not_end_a_move() {
    move_among(vec![Words::AtOnce(vec![])]);
}

#[test]
fn strangers_who_begin_well_do_not_end_a_move() {
    move_among(vec![Words::AtOnce(half_a_preamble()), Words::Dribbled(half_a_preamble())]);
}
