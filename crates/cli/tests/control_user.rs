//! Who may speak to a move that runs. Needs root: it takes another user's part.

#[allow(dead_code, reason = "each test binary uses a part")]
use std::{
    fs,
    io::{self, BufRead, BufReader, Write},
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixStream,
    },
    thread,
};

use rustix::{process::Uid, thread::set_thread_res_uid};

use crate::session::{Run, Sockets, transship};

/// A user that exists everywhere, by number at least.
const ANOTHER: u32 = 65534;

/// Asks as `user`, and gives the answer; nothing if it is hung up on.
fn ask(socket: &str, user: u32, words: &str) -> io::Result<String> {
    let ask = || {
        // Of this thread alone.
        let user = Uid::from_raw(user);
        set_thread_res_uid(user, user, user)?;
        let mut stream = UnixStream::connect(socket)?;
        stream.write_all(words.as_bytes())?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        Ok(line)
    };
    thread::scope(|scope| scope.spawn(ask).join().unwrap())
}

#[test]
fn another_user_can_not_end_a_move() {
    let session = Sockets::new();
    let (source, destination) =
        (session.guest("a", &["--mem", "8M"]), session.guest("b", &["--mem", "8M", "--incoming"]));
    let receive = session.receive(&destination);
    let socket = session.path("control");
    // The folder is open: it is the socket that decides.
    let folder = std::path::Path::new(&socket).parent().unwrap();
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    let mut moving = session.start(session.moving(&source, &["--hold", "--control", &socket]));
    moving.wait_for_line("held for");
    assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
    let cancel = "{\"call\":\"cancel\"}\n";
    assert!(ask(&socket, ANOTHER, cancel).is_err(), "the file lets nobody else in");
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(!ask(&socket, ANOTHER, cancel).is_ok_and(|line| !line.is_empty()), "nor does the move");
    moving.wait_for_line(&format!("turned away a connection of user {ANOTHER}"));
    assert!(ask(&socket, 0, "{\"call\":\"status\"}\n").unwrap().contains("\"hold\":\"ready\""));
    let go = Run::of(transship(&["go", &socket]).output().unwrap());
    assert_eq!((go.code, go.stdout), (0, format!("{}: it goes on\n", source.vm)));
    assert_eq!(moving.wait().code, 0);
    assert_eq!(receive.wait().code, 0);
    assert_eq!(destination.check().wrong, 0);
}
