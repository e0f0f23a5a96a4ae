//! Certificates for servers of tests, by an authority nobody trusts unless told to.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use tempfile::TempDir;

/// An authority, with the files it wrote.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: TempDir,
}

/// A certificate and its key, in PEM files that are gone with their authority.
#[derive(Debug, Clone)]
pub struct CertificateFiles {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl Authority {
    /// A new one, which has nothing to do with any other.
    ///
    /// # Panics
    /// When the temporary directory cannot be written.
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("signed");
        let dir = tempfile::tempdir().expect("a temporary directory");
        fs::write(dir.path().join("ca.pem"), issuer.pem()).expect("written");
        Self { issuer, dir }
    }

    /// The file to trust.
    pub fn file(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// A certificate for a host name or an address.
    ///
    /// # Panics
    /// When the name makes no sense.
    pub fn certify(&self, host: &str) -> CertificateFiles {
        self.sign(host, host, 2099)
    }

    /// One that is over since long ago.
    ///
    /// # Panics
    /// When the name makes no sense.
    pub fn certify_expired(&self, host: &str) -> CertificateFiles {
        self.sign(host, "expired", 2001)
    }

    fn sign(&self, host: &str, file: &str, until: i32) -> CertificateFiles {
        let mut params = CertificateParams::new(vec![host.to_owned()]).expect("a name");
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(until, 1, 1);
        let key = KeyPair::generate().expect("a key");
        let signed = params.signed_by(&key, &self.issuer).expect("signed");
        let path = |ending: &str| self.dir.path().join(format!("{file}.{ending}"));
        let files = CertificateFiles { certificate: path("pem"), key: path("key") };
        write(&files.certificate, &signed.pem());
        write(&files.key, &key.serialize_pem());
        files
    }
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
