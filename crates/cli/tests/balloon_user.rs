//! Who may connect with a balloon. Needs root: it takes another user's part.

#[allow(dead_code, reason = "each test binary uses a part")]
use std::{
    fs,
    io::{self, Read, Write},
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixStream,
    },
    thread,
};

use rustix::{process::Uid, thread::set_thread_res_uid};

use crate::session::{Run, Sockets, transship};

/// Users that exist everywhere, by number at least.
const QEMUS: u32 = 64055;
const ANOTHER: u32 = 65534;

/// What a QEMU says first: VHOST_USER_GET_FEATURES. The answer begins with the same number.
const QEMUS_WORDS: &[u8] = &[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
/// What a client may say, and is told to be no request.
const CLIENTS_WORDS: &[u8] = b"{}\n";

/// Connects as `user`, and gives the first byte of the answer.
fn answer(socket: &str, user: u32, words: &[u8]) -> io::Result<u8> {
    let ask = || {
        // Of this thread alone.
        let user = Uid::from_raw(user);
        set_thread_res_uid(user, user, user)?;
        let mut balloon = UnixStream::connect(socket)?;
        balloon.write_all(words)?;
        let mut byte = [0];
        balloon.read_exact(&mut byte)?;
        Ok(byte[0])
    };
    thread::scope(|scope| scope.spawn(ask).join().unwrap())
}

#[test]
fn a_balloon_of_root_serves_the_user_that_was_named_and_no_other() {
    let session = Sockets::new();
    let socket = session.path("balloon");
    // The folder is open: it is the socket that decides.
    let folder = std::path::Path::new(&socket).parent().unwrap();
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    let mut balloon = session.start(transship(&["balloon", "--socket", &socket, "--user", &QEMUS.to_string()]));
    balloon.wait_for_line("listening at");
    let made = fs::metadata(&socket).unwrap();
    assert_eq!((made.uid(), made.mode() & 0o777), (QEMUS, 0o600));
    assert_eq!(answer(&socket, QEMUS, QEMUS_WORDS).unwrap(), 1, "QEMU's user");
    assert_eq!(answer(&socket, 0, CLIENTS_WORDS).unwrap(), b'{', "root");
    assert!(answer(&socket, ANOTHER, CLIENTS_WORDS).is_err(), "the file lets nobody else in");
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(answer(&socket, ANOTHER, CLIENTS_WORDS).is_err(), "nor does the balloon");
    balloon.wait_for_line(&format!("turned away a connection of user {ANOTHER}"));
    balloon.terminate();
    assert_eq!(balloon.wait().code, 0);
}

#[test]
fn users_have_names() {
    let session = Sockets::new();
    let socket = session.path("balloon");
    let mut balloon = session.start(transship(&["balloon", "--socket", &socket, "--user", "nobody"]));
    balloon.wait_for_line("listening at");
    assert_eq!(fs::metadata(&socket).unwrap().uid(), ANOTHER);
    let run =
        Run::of(transship(&["balloon", "--socket", &session.path("b"), "--user", "no such user"]).output().unwrap());
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("--user \"no such user\": there is no such user"), "{run:?}");
}
