//! A Rails application under load: Puma, and clients that use its pages.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use anyhow::ensure;
use rbprof::symbolize::Resolved;
use tempfile::TempDir;
use xtask::rubies::Rails;
use xtask::rubies::rails;
use xtask::rubies::rails::Interpreter;
use xtask::setup;

use crate::http;
use crate::http::Answer;
use crate::rig;
use crate::target::Target;

/// What Puma says before the address.
const LISTENING: &str = "* Listening on http://127.0.0.1:";
/// So long may a number of requests take.
const PATIENCE: Duration = Duration::from_secs(120);
/// The application wants to be used through TLS, which a proxy would end.
const BEHIND_TLS: &str = "X-Forwarded-Proto: https";

/// Rails, if this user can start and record it.
///
/// # Errors
/// If it cannot, and nothing may be left out here.
pub fn find() -> Result<Option<Rails>> {
    if !setup::is_root() {
        rig::skip("recording needs root")?;
        return Ok(None);
    }
    match rails::find() {
        Ok(rails) => Ok(Some(rails)),
        Err(error) => {
            rig::skip(&error.to_string())?;
            Ok(None)
        }
    }
}

/// A running Puma with the application and a database of its own; killed when
/// dropped, and when the thread that started it ends.
#[derive(Debug)]
pub struct Server {
    puma: Target,
    port: u16,
    _storage: TempDir,
}

impl Server {
    /// Starts it with that number of threads, and waits until it listens.
    ///
    /// # Errors
    /// If it cannot be started, or ends before.
    pub fn start(rails: &Rails, interpreter: Interpreter, threads: u32) -> Result<Self> {
        let storage = tempfile::tempdir()?;
        let mut command = rails.server(interpreter, threads, storage.path())?;
        let mut puma = Target::start(&mut command)?;
        let mut said = Vec::new();
        let port = loop {
            let line = puma.next_line().with_context(|| said.join("\n"))?;
            if let Some(port) = line.strip_prefix(LISTENING) {
                break port.parse()?;
            }
            said.push(line);
        };
        // Puma says which Ruby it runs on, and Ruby whether YJIT is on.
        let with_yjit = said.iter().any(|line| line.contains("+YJIT"));
        ensure!(
            with_yjit == (interpreter == Interpreter::Yjit),
            "{interpreter:?}: {said:?}"
        );
        Ok(Self {
            puma,
            port,
            _storage: storage,
        })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.puma.pid()
    }

    /// Has `clients` threads use the application from now on.
    #[must_use]
    pub fn load(&self, clients: usize) -> Load {
        let shared = Arc::new(Shared::default());
        let threads = (0..clients).map(|number| {
            let (shared, port) = (Arc::clone(&shared), self.port);
            std::thread::spawn(move || {
                while !shared.over.load(Ordering::Relaxed) {
                    visit(port, number, &shared.answers)?;
                }
                Ok(())
            })
        });
        Load {
            threads: threads.collect(),
            shared,
        }
    }
}

/// Which functions a thread starts with, by what their source says.
#[derive(Debug)]
pub struct ThreadStarts<'a> {
    rails: &'a Rails,
    /// By file and line.
    known: HashMap<(String, u32), bool>,
}

impl<'a> ThreadStarts<'a> {
    /// Those of an application whose sources are there.
    #[must_use]
    pub fn new(rails: &'a Rails) -> Self {
        Self {
            rails,
            known: HashMap::new(),
        }
    }

    /// Whether this is the outermost frame of a thread, by its name.
    pub fn include(&mut self, frame: &Resolved) -> bool {
        let function = &frame.function;
        if &*function.label == "<main>" {
            return true;
        }
        let place = (function.file.to_string(), function.first_line);
        *self.known.entry(place).or_insert_with_key(|(file, line)| {
            // A thread starts with the block that its creation is given.
            let source = std::fs::read_to_string(self.rails.file(file)).unwrap_or_default();
            let index = usize::try_from(*line).unwrap_or(0).saturating_sub(1);
            let line = source.lines().nth(index).unwrap_or_default();
            function.label.starts_with("block ")
                && ["Thread.new", "Thread.start", "Thread.fork"]
                    .iter()
                    .any(|call| line.contains(call))
        })
    }
}

#[derive(Debug, Default)]
struct Shared {
    over: AtomicBool,
    answers: AtomicU64,
}

/// Clients that use the application until this is dropped.
#[derive(Debug)]
pub struct Load {
    threads: Vec<JoinHandle<Result<()>>>,
    shared: Arc<Shared>,
}

impl Load {
    /// How many requests have been answered.
    #[must_use]
    pub fn answers(&self) -> u64 {
        self.shared.answers.load(Ordering::Relaxed)
    }

    /// Waits until `count` more have been answered.
    ///
    /// # Errors
    /// If that takes minutes, or no client is left.
    pub fn wait_for(&self, count: u64) -> Result<()> {
        let (start, enough) = (Instant::now(), self.answers() + count);
        while self.answers() < enough {
            ensure!(
                start.elapsed() < PATIENCE,
                "{} answers in {PATIENCE:?}",
                self.answers()
            );
            if self.threads.iter().all(JoinHandle::is_finished) {
                bail!("every client failed after {} answers", self.answers());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Ends it, and says how many requests were answered.
    ///
    /// # Errors
    /// If one of them was not, or not as it should have been.
    pub fn finish(mut self) -> Result<u64> {
        self.shared.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            match thread.join() {
                Ok(result) => result.context("a client")?,
                Err(_) => bail!("a client panicked"),
            }
        }
        Ok(self.answers())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // Who wants to know has asked before.
            drop(thread.join());
        }
    }
}

/// A visit: lists all posts, writes one, looks at it, and takes it away.
fn visit(port: u16, client: usize, answers: &AtomicU64) -> Result<()> {
    let mut cookie = "Cookie: none=1".to_owned();
    let mut ask = |method: &str, path: &str, form: Option<&str>, status: u16| -> Result<Answer> {
        let answer = http::ask(port, method, path, &[BEHIND_TLS, &cookie], form)?;
        ensure!(
            answer.status == status,
            "{method} {path}: {} {}",
            answer.status,
            answer.body
        );
        if let Some(session) = answer.header("set-cookie") {
            let pair = session.split(';').next().unwrap_or(session);
            cookie = format!("Cookie: {pair}");
        }
        answers.fetch_add(1, Ordering::Relaxed);
        Ok(answer)
    };
    let list = ask("GET", "/posts", None, 200)?;
    ensure!(list.body.contains("Post 49"), "a list without the last row");

    let form = ask("GET", "/posts/new", None, 200)?;
    let token = token(&form.body)?;
    let fields = format!(
        "authenticity_token={token}&post%5Btitle%5D=Of+client+{client}&post%5Bbody%5D=Dolor+sit+amet"
    );
    let created = ask("POST", "/posts", Some(&fields), 302)?;
    let place = created.header("location").context("no place of the post")?;
    let path = place
        .find("/posts/")
        .and_then(|at| place.get(at..))
        .context("a post at another place")?;
    let post = ask("GET", path, None, 200)?;
    ensure!(
        post.body.contains(&format!("Of client {client}")),
        "another post"
    );
    let fields = format!("_method=delete&authenticity_token={token}");
    ask("POST", path, Some(&fields), 303)?;
    Ok(())
}

/// What a form must send along, from the page's `<meta name="csrf-token">`.
fn token(page: &str) -> Result<String> {
    let (_, rest) = page
        .split_once("name=\"csrf-token\" content=\"")
        .context("a page without a token")?;
    let (token, _) = rest.split_once('"').context("a token without an end")?;
    // Base 64, of which a form takes all but these as they are.
    Ok(token
        .replace('+', "%2B")
        .replace('/', "%2F")
        .replace('=', "%3D"))
}
