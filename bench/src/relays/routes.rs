//! One migration, by one of the ways from QEMU to QEMU.
use std::time::Instant;

use serde::Serialize;
use serde_json::json;
use transship_lab::SlowLink;

use crate::{
    codecs::{Method, qemu_parameters},
    ours,
    pair::{Pair, text},
    processes,
    results::{Cpu, Run, Sides},
    stock,
};

/// How the bytes get from one QEMU to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Route {
    /// Directly, compressed by QEMU.
    Zstd,
    /// Directly, as they are.
    Plain,
    /// Through relays, as many connections everywhere.
    Relays,
    /// The same, but QEMU gives and takes one stream.
    OneStream,
    /// The same, and the relays have one connection, too.
    OneConnection,
}

impl Route {
    pub(crate) const ALL: [Self; 5] = [Self::Zstd, Self::Plain, Self::Relays, Self::OneStream, Self::OneConnection];

    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Zstd => "QEMU, multifd zstd",
            Self::Plain => "QEMU, multifd",
            Self::Relays => "relays",
            Self::OneStream => "relays, QEMU without multifd",
            Self::OneConnection => "relays with one connection",
        }
    }

    pub(crate) fn has_relays(self) -> bool {
        matches!(self, Self::Relays | Self::OneStream | Self::OneConnection)
    }

    /// Whether QEMU has channels.
    fn has_multifd(self) -> bool {
        matches!(self, Self::Zstd | Self::Plain | Self::Relays)
    }

    fn method(self) -> Method {
        if self == Self::Zstd { Method::Zstd } else { Method::None }
    }
}

/// Migrates the guest, and compares its memory if that is wanted.
pub(crate) fn run(pair: &Pair<'_>, link: &SlowLink, route: Route, channels: u8, compare: bool) -> Result<Run, String> {
    let parameters = qemu_parameters(channels, route.method());
    stock::prepare(pair, parameters)?;
    stock::with_return_path(&pair.source)?;
    let sides = [&pair.source, &pair.destination];
    sides.into_iter().try_for_each(|qemu| stock::switch(qemu, "multifd", route.has_multifd()))?;
    let run = if route.has_relays() {
        let connections = if route == Route::OneConnection { 1 } else { channels };
        through_relays(pair, link, connections)?
    } else {
        stock::run_prepared(pair, stock::start)?.into()
    };
    Ok(Run { equal: pair.compared(compare)?, ..run })
}

/// The relays wait before it begins, as a service of both hosts would.
fn through_relays(pair: &Pair<'_>, link: &SlowLink, connections: u8) -> Result<Run, String> {
    let socket = |name: &str| format!("unix:{}", pair.destination.folder().join(name).display());
    let (at_source, at_destination) = (socket("near"), socket("far"));
    pair.destination.qmp("migrate-incoming", json!({ "uri": at_destination })).map_err(text)?;
    let more = ["--channels", &connections.to_string(), "--json"];
    let [mut near, mut far] = ours::relays(link, &at_source, &at_destination, &more)?;
    let qemu = stock::run_prepared(pair, |pair| {
        let begin = Instant::now();
        pair.source.qmp("migrate", json!({ "uri": at_source })).map_err(text)?;
        Ok(begin)
    })?;
    let [source, destination] = processes::follow([near.process(), far.process()], Instant::now())?;
    let transship = Sides { source: source.cpu_seconds, destination: destination.cpu_seconds };
    Ok(Run { ms: qemu.ms, wire_bytes: ours::relayed([near, far])?, cpu: Cpu { transship, ..qemu.cpu }, equal: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_direct_migration_is_compressed_by_qemu() {
        for route in Route::ALL {
            assert!(route.method() == Method::None || !route.has_relays(), "{route:?}");
            assert!(route.has_multifd() || route.has_relays(), "{route:?}");
        }
    }
}
