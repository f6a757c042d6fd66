//! Both ends with certificates: who is believed, and what each end says about one that is not.
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};

use super::{Ended, meet};
use crate::{Caller, Certificates, Host, PeerName, Pem, Piece, SecureError, Usage};

/// Somebody who signs.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// What an end has in its folder, in PEM.
struct Folder {
    ca: String,
    crl: Option<String>,
    own: String,
    key: String,
}

impl Authority {
    fn new() -> Self {
        Self::until(4096)
    }

    fn until(year: i32) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, "Harbour authority");
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(year, 1, 1);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    fn sign(&self, params: CertificateParams) -> Folder {
        let key = KeyPair::generate().unwrap();
        let own = params.signed_by(&key, &self.issuer).unwrap().pem();
        Folder { ca: self.pem.clone(), crl: None, own, key: key.serialize_pem() }
    }

    /// A list that is good until that year.
    fn list(&self, serials: &[u64], until: i32) -> String {
        let revoked = serials.iter().map(|&serial| RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: date_time_ymd(2001, 1, 1),
            reason_code: None,
            invalidity_date: None,
        });
        CertificateRevocationListParams {
            this_update: date_time_ymd(2001, 1, 1),
            next_update: date_time_ymd(until, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        }
        .signed_by(&self.issuer)
        .unwrap()
        .pem()
        .unwrap()
    }
}

fn of(name: &str, purpose: ExtendedKeyUsagePurpose) -> CertificateParams {
    let mut params = CertificateParams::new([name.to_owned()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, format!("{name} itself"));
    params.extended_key_usages = vec![purpose];
    params.serial_number = Some(SerialNumber::from(7));
    params.not_before = date_time_ymd(2000, 1, 1);
    params
}

fn server(name: &str) -> CertificateParams {
    of(name, ExtendedKeyUsagePurpose::ServerAuth)
}

fn client(name: &str) -> CertificateParams {
    of(name, ExtendedKeyUsagePurpose::ClientAuth)
}

impl Folder {
    fn read(&self) -> Result<Arc<Certificates>, crate::Unusable> {
        let [ca, own, key] = [&self.ca, &self.own, &self.key].map(|text| text.as_bytes());
        let crl = self.crl.as_ref().map(String::as_bytes);
        Certificates::from_pem(Pem { authorities: ca, revoked: crl, own, key }).map(Arc::new)
    }

    fn open(&self) -> Arc<Certificates> {
        self.read().unwrap()
    }
}

fn names(names: &[&str]) -> Vec<PeerName> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn why(ended: Ended) -> String {
    match ended {
        Ok(_) => "it is trusted".into(),
        Err(SecureError::Broken(error)) => panic!("it is broken: {error}"),
        Err(failure) => failure.to_string(),
    }
}

/// What caller and host say, the host being called as `ship2`.
fn say(caller: &Folder, host: &Folder) -> [String; 2] {
    let caller = Caller::to_host(&caller.open(), "ship2").unwrap();
    let (here, there) = meet(&caller, &Host::with_certificates(&host.open(), Vec::new()));
    [why(here), why(there)]
}

#[track_caller]
fn assert_says([here, there]: [String; 2], [wanted_here, wanted_there]: [&str; 2]) {
    assert!(here.contains(wanted_here) && there.contains(wanted_there), "{here}\n{there}");
}

#[test]
fn those_of_one_authority_trust_each_other() {
    let authority = Authority::new();
    let (caller, host) = (authority.sign(client("ship1")), authority.sign(server("ship2")));
    for (name, is_right) in [("ship2", true), ("SHIP2", true), ("ship3", false), ("192.0.2.1", false)] {
        let calling = Caller::to_host(&caller.open(), name).unwrap();
        let (here, there) = meet(&calling, &Host::with_certificates(&host.open(), Vec::new()));
        assert_eq!((here.is_ok(), there.is_ok()), (is_right, is_right), "{name}");
    }
    assert!(Caller::to_host(&caller.open(), "no name").is_err());
    assert!(caller.open().check_own(Usage::Client).is_ok() && host.open().check_own(Usage::Server).is_ok());
}

#[test]
fn an_address_is_a_name() {
    let authority = Authority::new();
    let (caller, host) = (authority.sign(client("ship1")), authority.sign(server("192.0.2.1")));
    let calling = Caller::to_host(&caller.open(), "192.0.2.1").unwrap();
    assert!(meet(&calling, &Host::with_certificates(&host.open(), Vec::new())).0.is_ok());
    let calling = Caller::to_peer(&caller.open(), names(&["192.0.2.*", "192.0.2.1"]));
    assert!(meet(&calling, &Host::with_certificates(&host.open(), Vec::new())).0.is_ok());
}

/// By any of its names; with wildcards on either side.
#[test]
fn only_peers_with_the_right_names_are_let_in() {
    let authority = Authority::new();
    let host = authority.sign(server("ship2.example.org"));
    for (caller, allowed, is_right) in [
        ("ship1.example.org", &["ship1.example.org"][..], true),
        ("ship1.example.org", &["ship9", "*.example.org"], true),
        ("ship1.example.org", &["ship1.example.org itself"], true),
        ("*.example.org", &["ship1.example.org"], true),
        ("ship1.example.org", &["ship2.example.org", "*.example.net"], false),
    ] {
        let caller = authority.sign(client(caller)).open();
        let calling = Caller::to_peer(&caller, names(&["ship2.*.org"]));
        let (here, there) = meet(&calling, &Host::with_certificates(&host.open(), names(allowed)));
        assert_eq!((here.is_ok(), there.is_ok()), (is_right, is_right), "{allowed:?}");
        if !is_right {
            let words =
                ["is for none of the names that are allowed there", "none of the names that --peer-name allows"];
            assert_says([why(here), why(there)], words);
        }
        let calling = Caller::to_peer(&caller, names(&["ship2", "ship3.*.org"]));
        let (here, there) = meet(&calling, &Host::with_certificates(&host.open(), Vec::new()));
        let words = ["its certificate (ship2.example.org, ship2.example.org itself) is for none", "(--peer-name)"];
        assert_says([why(here), why(there)], words);
    }
}

#[test]
fn a_wrong_name_is_named_at_both_ends() {
    let authority = Authority::new();
    let said = say(&authority.sign(client("ship1")), &authority.sign(server("ship3")));
    assert_says(
        said,
        ["(ship3, ship3 itself) is not for ship2, by which it was called", "is not for the name by which"],
    );
}

#[test]
fn another_authority_is_none() {
    let (authority, other) = (Authority::new(), Authority::new());
    let (caller, host) = (authority.sign(client("ship1")), authority.sign(server("ship2")));
    let words = "is signed by none of the authorities in ca-cert.pem here";
    let theirs = "signed by no authority that is trusted there";
    assert_says(say(&other.sign(client("ship1")), &host), [words, theirs]);
    // The caller knows both.
    let mut stranger = other.sign(client("ship1"));
    stranger.ca = authority.pem.clone();
    assert_says(say(&stranger, &host), [theirs, words]);
    assert!(stranger.open().check_own(Usage::Client).unwrap_err().why.contains("none of the authorities"));
    let mut both = caller;
    both.ca = [other.pem.clone(), authority.pem].concat();
    assert_says(say(&both, &host), ["it is trusted", "it is trusted"]);
}

#[test]
fn who_signs_for_himself_is_nobody() {
    let authority = Authority::new();
    let key = KeyPair::generate().unwrap();
    let own = client("ship1").self_signed(&key).unwrap().pem();
    let own = Folder { ca: authority.pem.clone(), crl: None, own, key: key.serialize_pem() };
    assert_says(
        say(&own, &authority.sign(server("ship2"))),
        ["no authority that is trusted there", "signed by itself"],
    );
    // Nor is one whose certificate is an authority's.
    let mut params = client("ship1");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let own = authority.sign(params);
    assert_says(say(&own, &authority.sign(server("ship2"))), ["not for this purpose", "is one of an authority"]);
}

#[test]
fn time_is_kept() {
    let authority = Authority::new();
    let over = |mut params: CertificateParams| {
        params.not_after = date_time_ymd(2001, 2, 3);
        authority.sign(params)
    };
    let (caller, host) = (authority.sign(client("ship1")), authority.sign(server("ship2")));
    let words = "expired on 2001-02-03T00:00:00Z";
    assert_says(say(&over(client("ship1")), &host), ["has expired or is not good yet", words]);
    assert_says(say(&caller, &over(server("ship2"))), [words, "has expired or is not good yet"]);
    let unusable = over(client("ship1")).open().check_own(Usage::Client).unwrap_err();
    assert!(unusable.piece == Piece::Own && unusable.why.contains(words), "{unusable:?}");
    let mut early = client("ship1");
    early.not_before = date_time_ymd(4000, 1, 1);
    assert_says(say(&authority.sign(early), &host), ["the clocks of both hosts", "is good from 4000-01-01T"]);

    let mut old = Authority::until(2001).sign(client("ship1"));
    let unusable = old.read().unwrap_err();
    assert!(unusable.piece == Piece::Authorities && unusable.why.contains("expired on 2001-01-01"), "{unusable:?}");
    old.ca.push_str(&authority.pem);
    assert!(old.read().is_ok(), "there is another one");
}

#[test]
fn what_was_revoked_does_not_count() {
    let authority = Authority::new();
    let (caller, host) = (authority.sign(client("ship1")), authority.sign(server("ship2")));
    let with = |folder: &Folder, crl: String| Folder {
        crl: Some(crl),
        ca: folder.ca.clone(),
        own: folder.own.clone(),
        key: folder.key.clone(),
    };
    let listed = authority.list(&[5, 7], 4000);
    assert_says(say(&caller, &with(&host, listed.clone())), ["was revoked", "was revoked (ca-crl.pem)"]);
    assert_says(say(&with(&caller, listed.clone()), &host), ["was revoked (ca-crl.pem)", "was revoked"]);
    assert!(with(&caller, listed).open().check_own(Usage::Client).unwrap_err().why.contains("was revoked"));
    let others = authority.list(&[5, 8], 4000);
    assert_says(say(&caller, &with(&host, others)), ["it is trusted", "it is trusted"]);
    // An old list may lack what was revoked since; one of somebody else says nothing.
    let old = authority.list(&[5], 2002);
    assert_says(say(&caller, &with(&host, old)), ["can't be checked there", "is good until 2002-01-01T"]);
    let strangers = Authority { pem: String::new(), issuer: Authority::new().issuer }.list(&[7], 4000);
    assert_says(say(&caller, &with(&host, strangers)), ["can't be checked there", "may not sign the list"]);
}

#[test]
fn a_certificate_has_a_purpose() {
    let authority = Authority::new();
    let said = say(&authority.sign(server("ship1")), &authority.sign(server("ship2")));
    assert_says(said, ["not for this purpose", "is not for a TLS client (its extended key usage)"]);
    let said = say(&authority.sign(client("ship1")), &authority.sign(client("ship2")));
    assert_says(said, ["is not for a TLS server (its extended key usage)", "not for this purpose"]);
}

#[test]
fn tokens_and_certificates_do_not_mix() {
    let authority = Authority::new();
    let (caller, host) = (authority.sign(client("ship1")), authority.sign(server("ship2")));
    let (by_token, token) = Host::with_new_token().unwrap();
    let (here, there) = meet(&Caller::to_host(&caller.open(), "ship2").unwrap(), &by_token);
    assert_says([why(here), why(there)], ["needs certificates as here (--tls)", "one side uses a token"]);
    let (here, there) = meet(&Caller::with_token(&token).unwrap(), &Host::with_certificates(&host.open(), Vec::new()));
    assert_says([why(here), why(there)], ["use --token or --tls on both", "one side uses a token"]);
}

/// As `certtool --generate-privkey --key-type ecdsa` wrote them, in both of its forms.
#[test]
fn keys_of_gnutls_are_read() {
    for key in [include_str!("gnutls-sec1.pem"), include_str!("gnutls-pkcs8.pem")] {
        assert!(key.contains("PRIVATE KEY"));
        let own = include_str!("gnutls-cert.pem").to_owned();
        let folder = Folder { ca: own.clone(), crl: None, own, key: key.to_owned() };
        assert!(folder.read().is_ok(), "{:?}", folder.read().unwrap_err());
    }
}

#[test]
fn files_that_do_not_fit_are_named() {
    let authority = Authority::new();
    let whole = || authority.sign(client("ship1"));
    let wrong = |change: fn(&mut Folder)| {
        let mut folder = whole();
        change(&mut folder);
        folder.read().unwrap_err()
    };
    let other_key = || KeyPair::generate().unwrap().serialize_pem();
    let mut mixed = whole();
    mixed.key = other_key();
    for (unusable, piece, words) in [
        (wrong(|folder| folder.ca = String::new()), Piece::Authorities, "holds no certificate in PEM"),
        (wrong(|folder| folder.own = folder.key.clone()), Piece::Own, "holds no certificate in PEM"),
        (wrong(|folder| folder.key = folder.own.clone()), Piece::Key, "holds no private key"),
        (wrong(|folder| folder.crl = Some(folder.ca.clone())), Piece::Revoked, "holds no revocation list"),
        (wrong(|folder| folder.own.truncate(100)), Piece::Own, "can't be read as PEM"),
        (wrong(|folder| folder.ca = folder.ca.replace("MII", "AII")), Piece::Authorities, "can't be read"),
        (mixed.read().unwrap_err(), Piece::Key, "is not the key of the certificate"),
    ] {
        assert!(unusable.piece == piece && unusable.why.contains(words), "{piece:?} {words}: {unusable:?}");
    }
}

/// Another process goes on in the place of either end: it expects the same names, and knows the same revocations.
#[test]
fn ends_that_were_revealed_are_the_same() {
    let authority = Authority::new();
    let (caller, mut host) = (authority.sign(client("ship1")), authority.sign(server("ship2")));
    host.crl = Some(authority.list(&[5], 4000));
    let (calling, hosting) = (caller.open(), host.open());
    let again = |caller: &Caller, host: &Host| {
        meet(&Caller::revealed(&caller.reveal()).unwrap(), &Host::revealed(&host.reveal()).unwrap())
    };
    let callers = |name: &str| {
        let peer = Caller::to_peer(&calling, names(&["nobody", name]));
        [Caller::to_host(&calling, name).unwrap(), peer]
    };
    let hosts =
        |name: &str| [Vec::new(), names(&["nobody", name])].map(|names| Host::with_certificates(&hosting, names));
    for (caller, host) in callers("ship2").iter().zip(&hosts("ship1")) {
        let (here, there) = again(caller, host);
        assert!(here.is_ok() && there.is_ok(), "{} {}", why(here), why(there));
    }
    for caller in callers("ship3") {
        let (here, _) = again(&caller, &hosts("ship1")[0]);
        assert!(why(here).contains("ship3"));
    }
    let (_, there) = again(&callers("ship2")[0], &hosts("ship3")[1]);
    assert!(why(there).contains("ship1"));
    host.crl = Some(authority.list(&[7], 4000));
    let (_, there) = again(&callers("ship2")[0], &Host::with_certificates(&host.open(), Vec::new()));
    assert!(why(there).contains("was revoked"));

    let text = callers("ship2")[0].reveal();
    let without_a_piece = text.rsplit_once('.').unwrap().0;
    for damaged in [without_a_piece, &text[1..], &text[..text.len() - 40], &format!("{}.", *text)] {
        assert!(matches!(Caller::revealed(damaged), Err(SecureError::Unsuited(_))), "{damaged}");
        assert!(matches!(Host::revealed(damaged), Err(SecureError::Unsuited(_))), "{damaged}");
    }
}
