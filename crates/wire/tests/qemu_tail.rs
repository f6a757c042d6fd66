//! What follows the memory: device sections by their description, and the one that says whether the guest ran.
use crate::streams::*;
use transship_wire::Error;
use transship_wire::qemu::*;

const BASE: u64 = 1000;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn real_tail() -> Vec<u8> {
    let bytes = sample("plain-10.0.2");
    let reader = read_all(&bytes, StreamReader::new(), |_, _, _| {}).unwrap();
    bytes[reader.position() as usize..].to_vec()
}

/// The body of a `globalstate` section.
fn body(state: &str) -> Vec<u8> {
    let mut body = vec![0; 104];
    body[3] = state.len() as u8 + 1;
    body[4..4 + state.len()].copy_from_slice(state.as_bytes());
    body
}

/// Sections of these names and bodies, the end, and if wanted the trailer.
fn tail(sections: &[(&str, &[u8])], with_trailer: bool) -> Vec<u8> {
    let mut writer = StreamWriter::new(BASE, 0);
    let names: Vec<_> = sections.iter().map(|(text, _)| name(text)).collect();
    let fields: Vec<_> = sections.iter().map(|(_, body)| [("all", "buffer", body.len() as u64)]).collect();
    for (number, (name, (_, body))) in names.iter().zip(sections).enumerate() {
        writer.full(number as u32, name, 0, 1, body);
    }
    writer.eof();
    if with_trailer {
        let described: Vec<_> = names
            .iter()
            .zip(&fields)
            .map(|(name, fields)| Described { name, instance: 0, version: 1, fields })
            .collect();
        writer.vmdesc(&describe(&described));
    }
    writer.take_bytes()
}

fn state(tail: &[u8]) -> Option<String> {
    GlobalState::find(tail, BASE).unwrap().map(|state| state.state)
}

#[test]
fn the_state_of_a_real_stream_is_changed_and_nothing_else() {
    let before = real_tail();
    let mut tail = before.clone();
    let mut found = GlobalState::find(&tail, BASE).unwrap().unwrap();
    assert_eq!(found.state, "prelaunch");
    found.patch(&mut tail, RunState::Running);
    assert_eq!((found.runs(), state(&tail)), (true, Some("running".into())));
    let changed: Vec<_> = (0..tail.len()).filter(|&at| tail[at] != before[at]).collect();
    let section = Tail::parse(&tail, BASE).unwrap().section("globalstate").unwrap().body.clone();
    assert!(changed.iter().all(|at| (section.start..section.start + 36).contains(at)), "{changed:?}");
    assert_eq!(tail[section][..36], body("running")[..36]);

    found.patch(&mut tail, RunState::Paused);
    assert_eq!((found.runs(), state(&tail)), (false, Some("paused".into())));
}

/// A QEMU that was told to leave the trailer out: the section is still the last one.
#[test]
fn the_state_without_a_trailer() {
    let real = real_tail();
    let json = Tail::parse(&real, BASE).unwrap().vmdesc.unwrap();
    let without = &real[..json.start - 5];
    assert!(!Tail::parse(without, BASE).unwrap().is_walked());
    assert_eq!(state(without), Some("prelaunch".into()));
    assert_eq!(state(&tail(&[("timer", &[0; 16])], false)), None);
    assert_eq!(state(&tail(&[("timer", &[0; 16])], true)), None);
}

/// A trailer that does not fit, as of a device that we don't understand: the section is found all the same.
#[test]
fn the_state_behind_a_device_that_is_not_understood() {
    let mut tail = tail(&[("odd", &[1; 50]), ("globalstate", &body("suspended"))], true);
    let json = Tail::parse(&tail, BASE).unwrap().vmdesc.unwrap().start;
    let size = json + String::from_utf8_lossy(&tail[json..]).find("50").unwrap();
    tail[size..size + 2].copy_from_slice(b"49");
    assert!(Tail::parse(&tail, BASE).is_err());
    let found = GlobalState::find(&tail, BASE).unwrap().unwrap();
    assert_eq!((&*found.state, found.runs()), ("suspended", true));
}

/// A guest fills a buffer of a device with what looks like sections, an end and a trailer.
#[test]
fn a_guest_forges_its_state() {
    let forged = tail(&[("globalstate", &body("running"))], true);
    for with_trailer in [true, false] {
        let mut devices: Vec<(&str, &[u8])> = vec![("fdc", &forged), ("globalstate", &[])];
        let own = body("paused");
        devices[1].1 = &own;
        let mut tail = tail(&devices, with_trailer);
        let mut found = GlobalState::find(&tail, BASE).unwrap().unwrap();
        assert_eq!(found.state, "paused");
        if with_trailer {
            assert_eq!(Tail::parse(&tail, BASE).unwrap().sections.len(), 2);
        }
        found.patch(&mut tail, RunState::Running);
        let places = tail.windows(8).filter(|window| window == b"running\0").count();
        assert_eq!(places, 2, "the forged one is left as it was");
    }
}

/// A guest fills a buffer with more trailers than anybody would look at: the one at the end is looked at first.
#[test]
fn a_guest_forges_many_trailers() {
    let forged = b"\0\x06\0\0\0\x0e{\"devices\":[]}".repeat(100);
    let bytes = tail(&[("fdc", &forged), ("globalstate", &body("paused"))], true);
    assert_eq!(Tail::parse(&bytes, BASE).unwrap().sections.len(), 2);
}

/// Without a trailer nothing but the end says which of two is the section; what is not there is none.
#[test]
fn a_forged_state_that_is_not_at_the_end() {
    let forged = [&tail(&[("globalstate", &body("running"))], false)[..], &[1]].concat();
    assert_eq!(state(&tail(&[("globalstate", &body("paused")), ("fdc", &forged)], false)), None);
}

/// On a block device what is behind the trailer is whatever was there before: here, the end of another tail.
#[test]
fn old_bytes_behind_the_tail() {
    let new = tail(&[("globalstate", &body("running"))], true);
    let old = tail(&[("timer", &[0; 16]), ("globalstate", &body("paused"))], true);
    for skip in [0, 5, 40] {
        let bytes = [&new[..], &old[skip..]].concat();
        let parsed = Tail::parse(&bytes, BASE).unwrap();
        assert_eq!((parsed.end, parsed.sections.len()), (new.len(), 1));
        assert_eq!(state(&bytes), Some("running".into()));
    }
}

#[test]
fn states_that_are_none() {
    let with = |body: &[u8]| GlobalState::find(&tail(&[("globalstate", body)], true), BASE).map(|_| ());
    let place = BASE as usize + 1 + 4 + 1 + 11 + 8;
    let changed = |at: usize, byte: u8| {
        let mut body = body("paused");
        body[at] = byte;
        body
    };
    assert_eq!(with(&body("paused")), Ok(()));
    for (body, field, offset) in [
        (changed(3, 1), "state length", place),
        (changed(3, 33), "state length", place),
        (changed(0, 1), "state length", place),
        // The name is longer or shorter than its length says.
        (changed(3, 6), "state", place + 9),
        (changed(3, 8), "state", place + 10),
        (changed(35, b'x'), "state", place + 10),
        (changed(5, 0xff), "state", place + 5),
    ] {
        assert_eq!(with(&body).unwrap_err().place(), (field, offset));
    }
    let error = with(&[0; 103]).unwrap_err();
    let Error::Named { field, name, offset, value, .. } = &error else { panic!("{error}") };
    assert_eq!((*field, &**name, *offset, *value), ("section length", "globalstate", 1025, 103), "{error}");
}

#[test]
fn sections_that_do_not_fit_their_description() {
    let good = tail(&[("timer", &[1; 16]), ("cpu", &[2; 300])], true);
    let json = Tail::parse(&good, BASE).unwrap().vmdesc.unwrap().start;
    let text = String::from_utf8_lossy(&good[json..]).into_owned();
    let refused = |changed: Vec<u8>| match Tail::parse(&changed, BASE).unwrap_err() {
        Error::Named { field, name, offset, .. } | Error::Refused { field, name, offset, .. } => {
            format!("{field} {name} {}", offset - BASE as usize)
        }
        Error::Invalid { field, offset, .. } => format!("{field} {}", offset - BASE as usize),
        other => panic!("{other}"),
    };
    let byte = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    let said = |from: &str, to: &str| {
        let at = json + text.find(from).unwrap();
        let mut bytes = good.clone();
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        bytes
    };
    // type 1, number 4, name 1 + 5, instance 4, version 4: the body is at 19, its footer at 35, the next section at 40.
    assert_eq!(refused(byte(0, 1)), "record type 0");
    assert_eq!(refused(byte(6, b'l')), "section limer 0");
    assert_eq!(refused(byte(14, 1)), "section timer 0");
    assert_eq!(refused(byte(35, 0)), "footer timer 35");
    assert_eq!(refused(byte(39, 7)), "footer 36");
    assert_eq!(refused(byte(40, 6)), "record type 40");
    assert_eq!(refused(said("16", "17")), "footer timer 36");
    assert_eq!(refused(said("16", "15")), "footer timer 34");
    assert_eq!(refused(said("300", "999")), "section cpu 40");
    // A trailer that is no description is none at all, and then the end is missing.
    let error = Tail::parse(&said("300", "-99"), BASE).unwrap_err();
    assert!(matches!(error, Error::Truncated { field: "end of the device sections", .. }), "{error}");
}

/// However it is cut, and whatever else looks like a trailer: the end is where the trailer's text ends.
#[test]
fn a_tail_that_comes_in_pieces_is_whole_at_its_end_alone() {
    let fake: &[u8] = &[0, 6, 0, 0, 0, 2, b'{', b'}', b'}'];
    for whole in [real_tail(), tail(&[("timer", &[1, 2, 3]), ("vga", fake), ("globalstate", &body("running"))], true)] {
        for piece in [1, 2, 3, 7, 100, 4096, whole.len()] {
            let mut watch = TailWatch::new();
            for end in (0..whole.len()).step_by(piece).skip(1) {
                assert_eq!(watch.whole(&whole[..end]), None, "{end}");
            }
            let parsed = watch.whole(&whole).unwrap();
            assert_eq!(Some(parsed), Tail::parse(&whole, 0).ok(), "in pieces of {piece}");
        }
    }
    let without = tail(&[("globalstate", &body("running"))], false);
    assert_eq!(TailWatch::new().whole(&without), None);
}

/// To take all of it apart at each piece would take days.
#[test]
fn a_tail_that_seems_to_end_everywhere_is_looked_at_once() {
    for piece in [&[0, 6, 0, 0, 0, 2, b'{', b'}'], b"}}}}}}}}"] {
        let (mut watch, mut bytes) = (TailWatch::new(), vec![4]);
        for _ in 0..1 << 20 {
            bytes.extend_from_slice(piece);
            assert_eq!(watch.whole(&bytes), None);
        }
    }
}
