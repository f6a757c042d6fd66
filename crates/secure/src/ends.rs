//! The two ends: what each shows of itself, and whom it takes for the other one.
use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use ring::rand::{SecureRandom, SystemRandom};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig, SignatureScheme,
    client::{
        AlwaysResolvesClientRawPublicKeys, Resumption, UnbufferedClientConnection,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{
        CryptoProvider,
        ring::{cipher_suite, default_provider, kx_group, sign::any_eddsa_type},
        verify_tls13_signature_with_raw_key,
    },
    pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime},
    server::{
        AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage, UnbufferedServerConnection,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::{CertifiedKey, SingleCertAndKey},
    version::TLS13,
};
use zeroize::Zeroizing;

use crate::{
    Certificates, PeerName, SecureError, Token,
    verify::{Expected, Verifier},
};

/// What stands before an Ed25519 key in the two forms that TLS and its libraries know (RFC 8410).
const PRIVATE_KEY: &[u8] = &[0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
const PUBLIC_KEY: &[u8] = &[0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];

/// The end that calls. Good for all connections of a session.
#[derive(Clone)]
pub struct Caller {
    by: CallerBy,
    pub(crate) word: Word,
}

#[derive(Clone)]
pub(crate) enum CallerBy {
    Token(Arc<ClientConfig>, Token),
    Certificates(Arc<Certificates>, Arc<Expected>),
}

/// The end that is called. Good for all connections of a session.
#[derive(Clone)]
pub struct Host {
    by: HostBy,
    pub(crate) word: Word,
}

#[derive(Clone)]
pub(crate) enum HostBy {
    Token(Arc<ServerConfig>, Arc<HostKey>),
    Certificates(Arc<Certificates>, Arc<Expected>),
}

/// What another process needs to be the same host of a token. It is wiped when it is dropped.
pub(crate) struct HostKey {
    seed: Zeroizing<[u8; 32]>,
    token: Token,
}

impl HostKey {
    pub(crate) fn parts(&self) -> (&[u8], &Token) {
        (&*self.seed, &self.token)
    }
}

/// What somebody has to show and has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lack {
    /// What it is.
    pub of: &'static str,
    /// For him.
    pub cure: &'static str,
}

/// Whether a host says behind the handshake that it accepts the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Word {
    /// A transship does.
    Due,
    /// In plain TLS nobody does.
    None,
}

/// How the two ends know each other, for words about why they don't.
#[derive(Debug, Clone)]
pub(crate) enum Means {
    Token,
    Certificates {
        /// What is wrong with the other side's, once that is known.
        refusal: Arc<OnceLock<String>>,
        /// For what this side's are.
        own: Arc<Certificates>,
    },
}

impl Means {
    fn certificates(own: &Arc<Certificates>) -> (Self, Arc<OnceLock<String>>) {
        let refusal = Arc::default();
        (Self::Certificates { refusal: Arc::clone(&refusal), own: Arc::clone(own) }, refusal)
    }
}

impl Caller {
    /// Calls the receiver that made the token, and no other.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn with_token(token: &Token) -> Result<Self, SecureError> {
        let own = key(&token.caller_seed())?;
        let provider = provider();
        let wanted = Arc::new(Pinned::new(token.host_key(), &provider));
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(ours)?
            .dangerous() // what is verified is stricter than a certificate: one key, and no other
            .with_custom_certificate_verifier(wanted)
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(own)));
        Ok(Self { by: CallerBy::Token(Arc::new(as_caller(config)), token.clone()), word: Word::Due })
    }

    /// Calls `host`, a name or an address for which the receiver's certificate has to be.
    ///
    /// # Errors
    /// It is neither.
    pub fn to_host(certificates: &Arc<Certificates>, host: &str) -> Result<Self, SecureError> {
        let name = ServerName::try_from(host.to_owned()).map_err(|_| {
            SecureError::Unsuited(format!("{host:?} is no name of a host that a certificate could be for"))
        })?;
        Ok(Self::with_certificates(certificates, Expected::Host(name)))
    }

    /// Calls a receiver whose certificate is for one of these names, whatever its address is.
    pub fn to_peer(certificates: &Arc<Certificates>, names: Vec<PeerName>) -> Self {
        Self::with_certificates(certificates, Expected::Named(names))
    }

    pub(crate) fn by(&self) -> &CallerBy {
        &self.by
    }

    pub(crate) fn with_certificates(certificates: &Arc<Certificates>, expected: Expected) -> Self {
        Self { by: CallerBy::Certificates(Arc::clone(certificates), Arc::new(expected)), word: Word::Due }
    }

    /// The same for a receiver that is no transship, and says in plain TLS what it has to say.
    #[must_use]
    pub fn in_plain_tls(self) -> Self {
        Self { word: Word::None, ..self }
    }

    pub(crate) fn connection(&self) -> Result<(UnbufferedClientConnection, Means), SecureError> {
        let (config, means) = match &self.by {
            CallerBy::Token(config, _) => (Arc::clone(config), Means::Token),
            CallerBy::Certificates(certificates, expected) => {
                let (means, refusal) = Means::certificates(certificates);
                let own = SingleCertAndKey::from(Arc::clone(&certificates.own));
                let config = ClientConfig::builder_with_provider(provider())
                    .with_protocol_versions(&[&TLS13])
                    .map_err(ours)?
                    .dangerous() // by the same library, with names that it does not know
                    .with_custom_certificate_verifier(verifier(certificates, expected, refusal))
                    .with_client_cert_resolver(Arc::new(own));
                (Arc::new(as_caller(config)), means)
            }
        };
        let name = ServerName::try_from("transship").expect("it is a name");
        Ok((UnbufferedClientConnection::new(config, name).map_err(ours)?, means))
    }
}

fn as_caller(mut config: ClientConfig) -> ClientConfig {
    config.resumption = Resumption::disabled();
    config.enable_secret_extraction = true;
    // A name would tell the network something, and is of no use to a host that is one.
    config.enable_sni = false;
    config
}

fn as_host(mut config: ServerConfig) -> ServerConfig {
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.enable_secret_extraction = true;
    config
}

/// For one connection.
fn verifier(
    certificates: &Arc<Certificates>,
    expected: &Arc<Expected>,
    refusal: Arc<OnceLock<String>>,
) -> Arc<Verifier> {
    let (certificates, expected) = (Arc::clone(certificates), Arc::clone(expected));
    Arc::new(Verifier { certificates, expected, provider: provider(), refusal })
}

impl Host {
    /// Makes a key, and the token by which one caller knows it.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn with_new_token() -> Result<(Self, Token), SecureError> {
        let no_random = |_| SecureError::Unsuited("the system has no random numbers for a key".into());
        let mut seed = Zeroizing::new([0; 32]);
        SystemRandom::new().fill(&mut *seed).map_err(no_random)?;
        let own = key(&seed)?;
        let public = own.cert.first().and_then(|public| public.strip_prefix(PUBLIC_KEY));
        let public = public.and_then(|key| key.try_into().ok()).expect("a key was made just now");
        let token = Token::new(public).map_err(no_random)?;
        Ok((Self::of_token(own, HostKey { seed, token: token.clone() })?, token))
    }

    fn of_token(own: Arc<CertifiedKey>, known: HostKey) -> Result<Self, SecureError> {
        let callers = key(&known.token.caller_seed())?;
        let callers = callers.cert[0].strip_prefix(PUBLIC_KEY).expect("a key was made just now");
        let provider = provider();
        let wanted = Arc::new(Pinned::new(callers, &provider));
        let config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(ours)?
            .with_client_cert_verifier(wanted)
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(own)));
        Ok(Self { by: HostBy::Token(Arc::new(as_host(config)), Arc::new(known)), word: Word::Due })
    }

    /// The host with this seed that made the token; none: it was made by another one.
    pub(crate) fn of_seed(seed: Zeroizing<[u8; 32]>, token: Token) -> Result<Option<Self>, SecureError> {
        let own = key(&seed)?;
        match own.cert.first().and_then(|public| public.strip_prefix(PUBLIC_KEY)) == Some(token.host_key()) {
            true => Self::of_token(own, HostKey { seed, token }).map(Some),
            false => Ok(None),
        }
    }

    /// Hears callers whose certificates are for one of these names; of no names: all with a certificate of an authority
    /// that is trusted.
    pub fn with_certificates(certificates: &Arc<Certificates>, names: Vec<PeerName>) -> Self {
        Self::expecting(certificates, if names.is_empty() { Expected::Anybody } else { Expected::Named(names) })
    }

    pub(crate) fn expecting(certificates: &Arc<Certificates>, expected: Expected) -> Self {
        Self { by: HostBy::Certificates(Arc::clone(certificates), Arc::new(expected)), word: Word::Due }
    }

    pub(crate) fn by(&self) -> &HostBy {
        &self.by
    }

    /// The same for callers that are no transship, and speak plain TLS.
    #[must_use]
    pub fn in_plain_tls(self) -> Self {
        Self { word: Word::None, ..self }
    }

    /// What those callers lack that speak in clear.
    pub fn lack(&self) -> Lack {
        match self.by {
            HostBy::Token(..) => {
                Lack { of: "token", cure: "a token is needed here; use the command that this receiver has printed" }
            }
            HostBy::Certificates(..) => Lack {
                of: "certificate",
                cure: "a certificate is needed here; use --tls DIR with those of this authority",
            },
        }
    }

    pub(crate) fn connection(&self) -> Result<(UnbufferedServerConnection, Means), SecureError> {
        let (config, means) = match &self.by {
            HostBy::Token(config, _) => (Arc::clone(config), Means::Token),
            HostBy::Certificates(certificates, expected) => {
                let (means, refusal) = Means::certificates(certificates);
                let own = SingleCertAndKey::from(Arc::clone(&certificates.own));
                let config = ServerConfig::builder_with_provider(provider())
                    .with_protocol_versions(&[&TLS13])
                    .map_err(ours)?
                    .with_client_cert_verifier(verifier(certificates, expected, refusal))
                    .with_cert_resolver(Arc::new(own));
                (Arc::new(as_host(config)), means)
            }
        };
        Ok((UnbufferedServerConnection::new(config).map_err(ours)?, means))
    }
}

/// Without keys, for logs.
impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Caller(…)")
    }
}

/// Without keys, for logs.
impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Host(…)")
    }
}

/// Something that can't be the other side's fault.
fn ours(error: Error) -> SecureError {
    SecureError::Unsuited(error.to_string())
}

/// The cipher that this processor is quickest with comes first; the caller's wish counts.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    #[cfg(target_arch = "x86_64")]
    let has_aes = std::arch::is_x86_feature_detected!("aes");
    #[cfg(not(target_arch = "x86_64"))]
    let has_aes = true;
    let mut provider = default_provider();
    provider.cipher_suites = vec![
        cipher_suite::TLS13_AES_128_GCM_SHA256,
        cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        cipher_suite::TLS13_AES_256_GCM_SHA384,
    ];
    if !has_aes {
        provider.cipher_suites.swap(0, 1);
    }
    provider.kx_groups = vec![kx_group::X25519, kx_group::SECP256R1, kx_group::SECP384R1];
    Arc::new(provider)
}

/// An Ed25519 key, with its public half in the place of a certificate.
fn key(seed: &[u8; 32]) -> Result<Arc<CertifiedKey>, SecureError> {
    let mut private = Zeroizing::new([0; PRIVATE_KEY.len() + 32]);
    private[..PRIVATE_KEY.len()].copy_from_slice(PRIVATE_KEY);
    private[PRIVATE_KEY.len()..].copy_from_slice(seed);
    let private = any_eddsa_type(&PrivatePkcs8KeyDer::from(&private[..])).map_err(ours)?;
    let public = private.public_key().expect("a signing key has a public half").to_vec();
    Ok(Arc::new(CertifiedKey::new(vec![CertificateDer::from(public)], private)))
}

/// Trusts one public key.
#[derive(Debug)]
struct Pinned {
    key: Vec<u8>,
    provider: Arc<CryptoProvider>,
}

impl Pinned {
    fn new(key: &[u8], provider: &Arc<CryptoProvider>) -> Self {
        Self { key: [PUBLIC_KEY, key].concat(), provider: Arc::clone(provider) }
    }

    fn check(&self, shown: &CertificateDer<'_>) -> Result<(), Error> {
        match shown.as_ref() == self.key {
            true => Ok(()),
            false => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }

    /// That the other side has the key that it shows.
    fn check_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let known = &self.provider.signature_verification_algorithms;
        verify_tls13_signature_with_raw_key(message, &SubjectPublicKeyInfoDer::from(shown.as_ref()), signature, known)
    }
}

pub(crate) const NO_TLS12: Error = Error::General(String::new());

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(shown).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(NO_TLS12)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, shown, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for Pinned {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(shown).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(NO_TLS12)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, shown, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
