//! An S3 of the test's own: moto's server on loopback, which `infra/prepare test` installed.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use drums_coordinator::bucket::{Bucket, BucketConfig};

/// What the server asks nobody about: it takes any name and secret.
pub const ACCESS_KEY_ID: &str = "AKIATEST";
pub const SECRET_ACCESS_KEY: &str = "a-secret-of-the-test";
pub const REGION: &str = "us-east-1";

#[derive(Debug)]
pub struct Moto {
    child: Child,
    address: SocketAddr,
}

fn program() -> Result<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = match cache {
        Some(cache) => cache,
        None => {
            PathBuf::from(std::env::var_os("HOME").context("neither HOME nor XDG_CACHE_HOME is set")?).join(".cache")
        }
    };
    let path = cache.join("drumsbench/moto/bin/moto_server");
    ensure!(path.exists(), "{} is not there; infra/prepare test installs it", path.display());
    Ok(path)
}

impl Moto {
    /// A server with one empty bucket; it ends with the value, and with the thread that started it.
    pub fn start(bucket: &str) -> Result<Self> {
        let path = program()?;
        let mut command = Command::new(&path);
        command.args(["-H", "127.0.0.1", "-p", "0"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let end_with_parent =
            || nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).map_err(std::io::Error::from);
        // SAFETY: between fork and exec only prctl is called, which is async-signal-safe.
        unsafe { command.pre_exec(end_with_parent) };
        let mut child = command.spawn().with_context(|| format!("cannot start {}", path.display()))?;
        let mut lines = BufReader::new(child.stderr.take().context("its standard error is a pipe")?);
        let mut said = String::new();
        let address = loop {
            let mut line = String::new();
            let n = lines.read_line(&mut line).context("cannot read what moto's server says")?;
            if n == 0 {
                let _ = child.wait();
                anyhow::bail!("moto's server ended: {said}");
            }
            if let Some((_, rest)) = line.split_once("Running on http://") {
                break rest.trim().parse().with_context(|| format!("moto's server listens on {rest:?}"))?;
            }
            said += &line;
        };
        // It logs each request; nobody reading would stop it in the end.
        std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        let moto = Self { child, address };
        moto.put(&format!("/{bucket}"))?;
        Ok(moto)
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A bucket of this server, with its credentials in a file in `dir`.
    pub fn bucket(&self, url: &str, dir: &Path) -> Bucket {
        let credentials = dir.join("credentials.toml");
        let text = format!("access_key_id = \"{ACCESS_KEY_ID}\"\nsecret_access_key = \"{SECRET_ACCESS_KEY}\"\n");
        fs::write(&credentials, text).expect("the test's folder takes a file");
        let private = fs::Permissions::from_mode(0o600);
        fs::set_permissions(&credentials, private).expect("the file is the test's own");
        let config = BucketConfig {
            url: url.to_owned(),
            region: Some(REGION.to_owned()),
            endpoint: Some(self.endpoint()),
            credentials: Some(credentials),
            artifacts: true,
        };
        Bucket::open(&config).expect("the settings fit together")
    }

    /// What tells a program who asks, and where.
    pub fn environment(&self) -> [(&'static str, String); 4] {
        [
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY.to_owned()),
            ("AWS_REGION", REGION.to_owned()),
            ("AWS_ENDPOINT_URL", self.endpoint()),
        ]
    }

    fn put(&self, path: &str) -> Result<()> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        write!(
            stream,
            "PUT {path} HTTP/1.1\r\nHost: {}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
            self.address
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.lines().next().is_some_and(|l| l.contains(" 200 ")), "moto's server says {answer}");
        Ok(())
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        // Both fail only for a child that has been reaped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
