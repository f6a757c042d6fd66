//! How long QEMU takes to say what whoever attaches from outside has to know at least: whether its guest runs, whether
//! somebody migrates it, and what memory it has.
use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    time::Instant,
};

use transship_lab::Qemu;

use crate::units::millis;

const HELLO: &str = "{\"execute\":\"qmp_capabilities\"}\n";
/// Told in one piece.
const QUESTIONS: [&str; 4] = [
    "{\"execute\":\"query-status\"}\n",
    "{\"execute\":\"query-migrate\"}\n",
    "{\"execute\":\"query-memdev\"}\n",
    "{\"execute\":\"human-monitor-command\",\"arguments\":{\"command-line\":\"info ramblock\"}}\n",
];

/// Milliseconds from the call until all is said. Nobody else may be connected to where others attach.
pub(crate) fn asked(qemu: &Qemu) -> Result<f64, String> {
    let path = qemu.qmp_path();
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let begin = Instant::now();
    let mut socket = UnixStream::connect(&path).map_err(failed)?;
    let mut answers = BufReader::new(socket.try_clone().map_err(failed)?);
    hear(&mut answers, "\"QMP\"").map_err(failed)?;
    socket.write_all(HELLO.as_bytes()).map_err(failed)?;
    hear(&mut answers, "\"return\"").map_err(failed)?;
    socket.write_all(QUESTIONS.concat().as_bytes()).map_err(failed)?;
    QUESTIONS.iter().try_for_each(|_| hear(&mut answers, "\"return\"")).map_err(failed)?;
    Ok(millis(begin.elapsed()))
}

/// The next line that is no event.
fn hear(answers: &mut impl BufRead, wanted: &str) -> std::io::Result<()> {
    let mut line = String::new();
    while answers.read_line(&mut line)? > 0 {
        if line.contains(wanted) {
            return Ok(());
        }
        if !line.contains("\"event\"") {
            break;
        }
        line.clear();
    }
    Err(std::io::Error::other(format!("no {wanted} but {line:?}")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_answer_is_not_taken_for_one() {
        let said = |text: &str| hear(&mut text.as_bytes(), "\"return\"").map_err(|error| error.to_string());
        assert_eq!(said("{\"event\": \"STOP\"}\n{\"return\": {}}\n"), Ok(()));
        assert!(said("{\"error\": {}}\n").unwrap_err().contains("error"));
        assert!(said("").unwrap_err().contains("no \"return\""));
    }
}
