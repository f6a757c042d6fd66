//! How certificates say who the other end is: what several commands ask alike.
use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Default, Args)]
pub(crate) struct TlsArgs {
    /// Encrypt (TLS 1.3) and show certificates, with the files in this folder
    ///
    /// They have the names that QEMU and libvirt give them: ca-cert.pem; client-cert.pem and client-key.pem where the
    /// command connects, server-cert.pem and server-key.pem where it listens; and ca-crl.pem if there is one. Both ends
    /// need this. The receiver's certificate must be for the HOST that is called, and each one must be signed by an
    /// authority in the other end's ca-cert.pem. docs/security.md shows how to make them.
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub(crate) tls: Option<PathBuf>,
    /// With --tls: a name that the other end's certificate may be for
    ///
    /// A DNS name, an IP address or the common name; `*` stands for any characters but dots. Can be given several
    /// times. Where the command listens: who may call, instead of everybody with a certificate of the authority. Where
    /// it connects: who may be called, instead of HOST.
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub(crate) peer_name: Vec<String>,
}
