//! The four ways in which the guest gets over.
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};
use transship_lab::{Authority, Holder, Qemu, Scratch, Transship};

use super::{
    far::Far,
    results::{Once, Way},
};
use crate::{
    codecs::qemu_parameters,
    ours::{self, Meeting},
    pair::{Pair, text},
    results::{OurRun, QemuRun},
    stock,
};

/// By all of them the guest comes to an address of this host.
const LISTEN: &str = "tcp:127.0.0.1:0";

/// How it is carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Wire {
    /// By transship, without encryption.
    Clear,
    /// By transship, with a key for this one move.
    Token,
    /// By transship, with certificates.
    Certificates,
    /// By QEMU's own migration, with the same certificates.
    Qemu,
}

impl Wire {
    pub(crate) const ALL: [Self; 4] = [Self::Clear, Self::Token, Self::Certificates, Self::Qemu];
    /// Those of transship.
    pub(crate) const OURS: [Self; 3] = [Self::Clear, Self::Token, Self::Certificates];

    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Clear => "in clear",
            Self::Token => "token",
            Self::Certificates => "certificates",
            Self::Qemu => "QEMU's TLS",
        }
    }
}

/// Two hosts with certificates of one authority.
pub(crate) struct Hosts(Scratch);

impl Hosts {
    pub(crate) fn new() -> Result<Self, String> {
        let (authority, folder) = (Authority::new().map_err(text)?, Scratch::new().map_err(text)?);
        for (name, names) in [("here", ["here", "127.0.0.2"]), ("there", ["there", "127.0.0.1"])] {
            authority.furnish(&folder.join(name), &Holder::named(names)).map_err(text)?;
        }
        Ok(Self(folder))
    }

    fn folder(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    /// `--tls` of a host.
    fn flags(&self, name: &str) -> Vec<String> {
        vec!["--tls".to_owned(), self.folder(name)]
    }
}

/// Moves the guest, over a connection with this delay if there is one.
pub(crate) fn run(
    pair: &Pair<'_>,
    wire: Wire,
    way: Way,
    hosts: &Hosts,
    delay: Option<Duration>,
) -> Result<Once, String> {
    match wire {
        Wire::Qemu => by_qemu(pair, way, hosts, delay).map(Once::from),
        Wire::Clear | Wire::Token | Wire::Certificates => ours(pair, wire, way, hosts, delay).map(Once::from),
    }
}

/// The port to call, and what makes it far.
fn farther(port: u16, delay: Option<Duration>) -> Result<(String, Option<Far>), String> {
    let far = delay.map(|delay| Far::new(port, delay)).transpose()?;
    let port = far.as_ref().map_or(Ok(port), Far::port)?;
    Ok((format!("tcp:127.0.0.1:{port}"), far))
}

fn ours(pair: &Pair<'_>, wire: Wire, way: Way, hosts: &Hosts, delay: Option<Duration>) -> Result<OurRun, String> {
    let receiving = match wire {
        Wire::Token => vec!["--token-lifetime".to_owned(), "1h".to_owned()],
        Wire::Certificates => hosts.flags("there"),
        Wire::Clear | Wire::Qemu => Vec::new(),
    };
    // It has to be there until the guest is.
    let between = std::cell::RefCell::new(None);
    let call = |receive: &Transship, uri: String| {
        let (to, far) = farther(ours::port(&uri)?, delay)?;
        between.replace(far);
        let flags = match wire {
            Wire::Token => vec!["--token".to_owned(), receive.token().map_err(text)?],
            Wire::Certificates => hosts.flags("here"),
            Wire::Clear | Wire::Qemu => Vec::new(),
        };
        Ok((to, flags))
    };
    let arguments = ["--channels", &way.channels.to_string(), "--compress", way.method.name()].map(str::to_owned);
    ours::run_by(pair, &Meeting { listen: LISTEN, receiving: &receiving, call: &call }, &arguments)
}

fn by_qemu(pair: &Pair<'_>, way: Way, hosts: &Hosts, delay: Option<Duration>) -> Result<QemuRun, String> {
    for (qemu, name, endpoint) in [(&pair.destination, "there", "server"), (&pair.source, "here", "client")] {
        let creds = json!({ "qom-type": "tls-creds-x509", "id": "tls0", "dir": hosts.folder(name),
            "endpoint": endpoint, "verify-peer": true });
        qemu.qmp("object-add", creds).map_err(text)?;
    }
    let mut parameters = qemu_parameters(way.channels, way.method);
    parameters["tls-creds"] = "tls0".into();
    stock::prepare(pair, parameters)?;
    pair.destination.qmp("migrate-incoming", json!({ "uri": LISTEN })).map_err(text)?;
    let (to, _far) = farther(listening(&pair.destination)?, delay)?;
    stock::run_prepared(pair, |pair| {
        let begin = Instant::now();
        pair.source.qmp("migrate", json!({ "uri": to })).map_err(text)?;
        Ok(begin)
    })
}

/// The port that QEMU has chosen.
fn listening(qemu: &Qemu) -> Result<u16, String> {
    let answer = qemu.qmp("query-migrate", json!({})).map_err(text)?;
    let port = answer.pointer("/socket-address/0/port").and_then(Value::as_str).and_then(|port| port.parse().ok());
    port.ok_or_else(|| format!("QEMU does not say where it listens: {answer}"))
}
