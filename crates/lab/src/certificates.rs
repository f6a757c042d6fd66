//! Certificates as QEMU and libvirt keep them: a folder for each host, made by an authority of our own.
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};

use crate::{LabError, Result, failed};

/// Somebody who signs certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

/// For whom certificates are.
#[derive(Debug, Clone)]
pub struct Holder {
    names: Vec<String>,
    serial: u64,
    /// They are good until this year begins.
    until: i32,
    signs_itself: bool,
}

impl Holder {
    /// DNS names or addresses; the first one is the common name, too.
    pub fn named<S: Into<String>>(names: impl IntoIterator<Item = S>) -> Self {
        let names = names.into_iter().map(Into::into).collect();
        Self { names, serial: 1, until: 4000, signs_itself: false }
    }

    /// With this serial number.
    pub fn serial(self, serial: u64) -> Self {
        Self { serial, ..self }
    }

    /// Certificates that are good no more.
    pub fn expired(self) -> Self {
        Self { until: 2001, ..self }
    }

    /// Certificates that nobody else has signed.
    pub fn signs_itself(self) -> Self {
        Self { signs_itself: true, ..self }
    }
}

fn wrong(error: rcgen::Error) -> LabError {
    LabError(format!("make a certificate: {error}"))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(failed(path.display()))
}

impl Authority {
    /// With a new key.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn new() -> Result<Self> {
        let key = KeyPair::generate().map_err(wrong)?;
        let mut params = CertificateParams::new([]).map_err(wrong)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, "Harbour authority");
        params.not_before = date_time_ymd(2000, 1, 1);
        let certificate = params.self_signed(&key).map_err(wrong)?.pem();
        Ok(Self { issuer: Issuer::new(params, key), certificate })
    }

    /// Fills a new folder: ca-cert.pem, and for both roles a certificate and its key.
    ///
    /// # Errors
    /// It can't be written.
    pub fn furnish(&self, folder: &Path, holder: &Holder) -> Result<()> {
        fs::create_dir(folder).map_err(failed(folder.display()))?;
        write(&folder.join("ca-cert.pem"), &self.certificate)?;
        for (role, purpose) in
            [("client", ExtendedKeyUsagePurpose::ClientAuth), ("server", ExtendedKeyUsagePurpose::ServerAuth)]
        {
            let key = KeyPair::generate().map_err(wrong)?;
            let mut params = CertificateParams::new(holder.names.clone()).map_err(wrong)?;
            params.distinguished_name.push(DnType::CommonName, holder.names[0].clone());
            params.extended_key_usages = vec![purpose];
            // QEMU wants both.
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
            params.serial_number = Some(SerialNumber::from(holder.serial));
            params.not_before = date_time_ymd(2000, 1, 1);
            params.not_after = date_time_ymd(holder.until, 1, 1);
            let made =
                if holder.signs_itself { params.self_signed(&key) } else { params.signed_by(&key, &self.issuer) };
            write(&folder.join(format!("{role}-cert.pem")), &made.map_err(wrong)?.pem())?;
            let path = folder.join(format!("{role}-key.pem"));
            write(&path, &key.serialize_pem())?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(failed(path.display()))?;
        }
        Ok(())
    }

    /// Puts a list of what is revoked into a folder.
    ///
    /// # Errors
    /// It can't be written.
    pub fn revoke(&self, folder: &Path, serials: &[u64]) -> Result<()> {
        let revoked = serials.iter().map(|&serial| RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: date_time_ymd(2001, 1, 1),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2001, 1, 1),
            next_update: date_time_ymd(4000, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.issuer).and_then(|list| list.pem()).map_err(wrong)?;
        write(&folder.join("ca-crl.pem"), &list)
    }
}

/// Without the key.
impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authority(…)")
    }
}
