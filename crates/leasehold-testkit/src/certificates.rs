//! Certificates for test servers, and the authority that signs them.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use tempfile::TempDir;

/// A certificate authority. Its files are removed on drop.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: TempDir,
}

/// A certificate and its key, in PEM files that are removed with their authority.
#[derive(Debug, Clone)]
pub struct CertificateFiles {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl Authority {
    /// Creates an authority.
    ///
    /// # Panics
    /// If the temporary directory cannot be written.
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("signed");
        let dir = tempfile::tempdir().expect("a temporary directory");
        fs::write(dir.path().join("ca.pem"), issuer.pem()).expect("written");
        Self { issuer, dir }
    }

    /// Returns the file of the authority's own certificate, for clients to trust.
    pub fn file(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// Creates a certificate for a host name or an address.
    ///
    /// # Panics
    /// If the name is invalid.
    pub fn certify(&self, host: &str) -> CertificateFiles {
        self.sign(host, host, 2099)
    }

    /// Creates a certificate that expired years ago.
    ///
    /// # Panics
    /// If the name is invalid.
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
