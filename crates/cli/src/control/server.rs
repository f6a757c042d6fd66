//! The socket of one move or save, and the thread that answers there.
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Instant,
};

use rustix::event::{PollFd, PollFlags};
use serde_json::Value;
use transship_engine::{Held, Phase, Progress};
use transship_lines::{GuestSocket, LineError, LineSocket, Shutdown, wait_for_any};

use super::{Call, Request, State, message::Answer, name};
use crate::{
    failure::Failure,
    output,
    runtime::Folder,
    signals::{self, Side},
};

/// So many may be connected at a time; one more, and the first one has to go.
const CLIENTS: usize = 16;

/// What runs.
#[derive(Debug)]
pub(crate) struct About {
    pub(crate) command: &'static str,
    /// As the user wrote them.
    pub(crate) vm: String,
    pub(crate) to: String,
    pub(crate) side: Side,
    pub(crate) begin: Instant,
}

/// Is there, and nobody answers yet. Its file goes with it.
pub(crate) struct Listening {
    socket: GuestSocket,
    about: About,
}

/// Answers while it lives. Its file goes with it, if this process may still remove it.
pub(crate) struct ControlSocket {
    shutdown: Shutdown,
    thread: Option<thread::JoinHandle<()>>,
}

impl About {
    /// It has just begun.
    pub(crate) fn new(command: &'static str, vm: &str, to: &str, side: Side) -> Self {
        Self { command, vm: vm.to_owned(), to: to.to_owned(), side, begin: Instant::now() }
    }
}

impl ControlSocket {
    /// Listens at `at`, or at the usual place. What is wrong with the usual place is only said, unless `needed`.
    ///
    /// # Errors
    /// It can't listen, and was asked to.
    pub(crate) fn listen(about: About, at: Option<&Path>, needed: bool) -> Result<Option<Listening>, Failure> {
        let is_usual = at.is_none();
        match at.map_or_else(|| usual(&about.vm), |path| Ok(path.to_owned())).and_then(|path| listen(&path)) {
            Ok(socket) => Ok(Some(Listening { socket, about })),
            Err(why) if is_usual && !needed => {
                output::complain(&format!("`transship status`, `cancel` and `go` won't find this: {why}"));
                Ok(None)
            }
            Err(why) => Err(Failure::Failed(format!("{why}. Choose another path with --control"))),
        }
    }

    /// Answers from now on.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub(crate) fn start(Listening { socket, about }: Listening, progress: &Arc<Progress>) -> io::Result<Self> {
        let (shutdown, progress) = (Shutdown::new()?, Arc::clone(progress));
        let server = Server { socket, about, progress, shutdown: shutdown.clone(), clients: Vec::new() };
        let thread = thread::Builder::new().name("steering".into()).spawn(move || server.run())?;
        Ok(Self { shutdown, thread: Some(thread) })
    }
}

impl Listening {
    /// Where it listens.
    pub(crate) fn path(&self) -> &Path {
        self.socket.path()
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.shutdown.request();
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; the move is not concerned.
            let _ = thread.join();
        }
    }
}

fn usual(vm: &str) -> Result<PathBuf, String> {
    Ok(Folder::Control.made()?.join(name::name(std::process::id(), vm)))
}

fn listen(path: &Path) -> Result<GuestSocket, String> {
    GuestSocket::listen(path).map_err(|error| error.to_string())
}

struct Server {
    socket: GuestSocket,
    about: About,
    progress: Arc<Progress>,
    shutdown: Shutdown,
    clients: Vec<LineSocket>,
}

impl Server {
    fn run(mut self) {
        while let Ok((called, ended)) = self.wait() {
            if ended {
                return;
            }
            let clients = std::mem::take(&mut self.clients);
            // Whoever breaks the rules, or does not take the answer, is hung up on.
            self.clients = clients.into_iter().filter_map(|client| self.serve(client).ok()).collect();
            if called && let Some(stream) = self.socket.accept() {
                if self.clients.len() >= CLIENTS {
                    self.clients.remove(0);
                }
                self.clients.push(LineSocket::new(stream));
            }
        }
    }

    /// Whether somebody calls, and whether it is over.
    fn wait(&self) -> io::Result<(bool, bool)> {
        use std::os::fd::AsFd;
        let clients = self.clients.iter().map(|client| client.stream().as_fd());
        let fds = [self.shutdown.event(), self.socket.fd()].into_iter().chain(clients);
        let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        wait_for_any(&mut fds, None)?;
        Ok((!fds[1].revents().is_empty(), !fds[0].revents().is_empty()))
    }

    /// Answers what has come. Nothing here waits.
    fn serve(&self, mut client: LineSocket) -> Result<LineSocket, LineError> {
        client.read_some()?;
        while let Some(line) = client.take_line()? {
            let answer = match serde_json::from_slice::<Request>(&line.text) {
                Ok(request) => self.answer(request),
                Err(error) => Err(format!("this is no request: {error}")),
            };
            let answer = match answer {
                Ok(ok) => Answer { ok: Some(ok), error: None },
                Err(error) => Answer { ok: None, error: Some(error) },
            };
            let text = serde_json::to_vec(&answer).map_err(|error| LineError::System(error.into()))?;
            client.send(&text, &[], Instant::now())?;
        }
        Ok(client)
    }

    fn answer(&self, request: Request) -> Result<Value, String> {
        let said = |words: &str| Ok(Value::from(words));
        match request.call {
            Call::Status => {
                serde_json::to_value(State::of(&self.about, &self.progress)).map_err(|error| error.to_string())
            }
            Call::Cancel => {
                let phase = self.progress.phase();
                self.progress.try_cancel().map_err(|phase| signals::answer(phase, 0, self.about.side).to_owned())?;
                let words = signals::answer(phase, 0, self.about.side);
                output::say(&format!("{words} (transship cancel)"));
                said(words)
            }
            Call::Go => {
                let words = match (self.progress.held(), self.progress.phase()) {
                    (Held::Never, _) => return Err("it is not held: it was started without --hold".into()),
                    (Held::Released, _) => "it goes on already",
                    (Held::Since(_), Phase::Held) => "it goes on",
                    (Held::NotYet, _) if !request.early => {
                        return Err("it has not converged yet: wait until it is held, or add --early".into());
                    }
                    (Held::Since(_), _) if !request.early => {
                        return Err(
                            "its guest has written so much that it must converge again: wait until it is held, \
                                    or add --early"
                                .into(),
                        );
                    }
                    _ => "it goes on when it has converged",
                };
                self.progress.release();
                said(words)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{os::unix::net::UnixStream, time::Duration};

    use serde_json::json;

    use super::*;

    fn about() -> About {
        About::new("move", "qemu:/run/vm1.qmp", "tcp:ship2:4444", Side::Source)
    }

    struct Open {
        folder: tempfile::TempDir,
        progress: Arc<Progress>,
        socket: Option<ControlSocket>,
    }

    fn open() -> Open {
        let (folder, progress) = (tempfile::tempdir().unwrap(), Progress::new());
        let listening = ControlSocket::listen(about(), Some(&folder.path().join("s")), true).unwrap().unwrap();
        let socket = ControlSocket::start(listening, &progress).unwrap();
        Open { folder, progress, socket: Some(socket) }
    }

    impl Open {
        fn connect(&self) -> LineSocket {
            LineSocket::new(UnixStream::connect(self.folder.path().join("s")).unwrap())
        }
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn ask(client: &mut LineSocket, text: &str) -> Value {
        client.send(text.as_bytes(), &[], later()).unwrap();
        serde_json::from_slice(&client.receive(later()).unwrap().text).unwrap()
    }

    #[test]
    fn it_says_how_it_does_and_ends_when_it_is_told_to() {
        let mut open = open();
        let mut client = open.connect();
        let state = ask(&mut client, r#"{"call":"status"}"#);
        assert_eq!((&state["ok"]["vm"], &state["ok"]["phase"]), (&json!("qemu:/run/vm1.qmp"), &json!("connecting")));
        let refused = ask(&mut client, r#"{"call":"go","early":true}"#);
        assert!(refused["error"].as_str().unwrap().contains("without --hold"), "{refused}");
        for phase in [Phase::HandedOver, Phase::Filling] {
            open.progress.set_phase(phase);
            let refused = ask(&mut client, r#"{"call":"cancel"}"#);
            assert!(refused["error"].as_str().is_some_and(|why| why.starts_with("too late")), "{refused}");
            assert!(!open.progress.is_cancelled());
        }
        open.progress.set_phase(Phase::Rounds);
        assert!(ask(&mut client, r#"{"call":"cancel"}"#)["ok"].as_str().unwrap().contains("runs on here"));
        assert!(open.progress.is_cancelled());
        open.socket.take();
        assert!(matches!(client.receive(later()), Err(LineError::Closed)));
        assert!(!open.folder.path().join("s").exists());
    }

    #[test]
    fn strange_words_are_answered_and_endless_ones_hung_up_on() {
        let open = open();
        let mut client = open.connect();
        for words in ["", "status", "{}", "[1", r#"{"call":7}"#] {
            assert!(ask(&mut client, words)["error"].as_str().unwrap().contains("no request"), "{words}");
        }
        // It may hang up before all of it is written.
        let _ = io::Write::write_all(&mut client.stream(), &vec![b'x'; 1 << 20]);
        assert!(client.receive(later()).is_err());
        let mut next = open.connect();
        assert!(ask(&mut next, r#"{"call":"status"}"#)["ok"].is_object());
    }

    #[test]
    fn many_who_stay_keep_nobody_out() {
        let open = open();
        let _silent: Vec<_> = (0..3 * CLIENTS).map(|_| open.connect()).collect();
        let mut last = open.connect();
        assert!(ask(&mut last, r#"{"call":"status"}"#)["ok"].is_object());
    }

    #[test]
    fn a_place_that_can_not_be_had_matters_only_where_it_was_asked_for() {
        let path = Path::new("/no/such/folder/s");
        let refused = ControlSocket::listen(about(), Some(path), false);
        assert!(matches!(refused, Err(Failure::Failed(why)) if why.contains("/no/such/folder/s")));
    }
}
