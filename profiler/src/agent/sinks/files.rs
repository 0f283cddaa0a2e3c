//! Profiles in files: `DIRECTORY/SERVICE/TIME-PID.pb.gz`.
//!
//! A file is written under a temporary name in the same directory, forced onto the
//! disk as configured, and then gets its name, which no file has yet: there is never
//! a part of a profile under a final name.
//!
//! What cannot be written stays in memory and is written later: after a second at
//! most at first, after a minute at most in the end. What failed goes to the end of
//! the line. Once more waits than may, the oldest is dropped and counted. A directory
//! of a service that vanished is made again; the directory of all is not, for it may
//! have been another file system.

use std::collections::VecDeque;
use std::fs;
use std::fs::File;
use std::io;
use std::io::ErrorKind;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use anyhow::Context as _;
use anyhow::Result;
use tokio::time::Instant;
use tokio::time::timeout_at;

use super::backoff::Backoff;
use super::config::FilesConfig;
use super::config::Fsync;
use super::counters::Counters;
use super::grouping::grouped;
use super::grouping::weight;
use super::inbox::Message;
use super::inbox::Receiver;
use super::names;
use super::retention;
use super::retention::Retention;
use crate::agent::batch::Batch;
use crate::output;
use crate::output::pprof;

const FIRST_RETRY: Duration = Duration::from_secs(1);
const MAX_RETRY: Duration = Duration::from_secs(60);
/// How many files can be of one process and moment.
const MAX_NUMBER: u32 = 1000;

/// The sink.
#[derive(Debug)]
pub(super) struct Files {
    config: FilesConfig,
    counters: Arc<Counters>,
    retention: Retention,
    waiting: VecDeque<(Batch, u64)>,
    waiting_bytes: u64,
    backoff: Backoff,
    retry_at: Option<Instant>,
}

impl Files {
    /// Makes the directory if there is none, and cleans up in it.
    ///
    /// # Errors
    /// If that cannot be done.
    pub(super) fn new(config: FilesConfig, counters: Arc<Counters>) -> Result<Self> {
        let directory = &config.directory;
        fs::create_dir_all(directory)
            .with_context(|| format!("making the directory {}", directory.display()))?;
        let leftovers = retention::remove_leftovers(directory)
            .with_context(|| format!("cleaning up in {}", directory.display()))?;
        if leftovers > 0 {
            log::info!("files: {leftovers} unfinished files of an earlier run removed");
        }
        let mut files = Self {
            retention: Retention::new(directory.clone(), config.max_age, config.max_size),
            config,
            counters,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            backoff: Backoff::new(FIRST_RETRY, MAX_RETRY),
            retry_at: None,
        };
        files.retain();
        Ok(files)
    }

    /// Writes what comes until nothing more can come. The thread waits for the disk.
    pub(super) async fn run(mut self, mut inbox: Receiver) {
        loop {
            let message = match self.retry_at {
                None => Ok(inbox.next().await),
                Some(at) => timeout_at(at, inbox.next()).await,
            };
            match message {
                Err(_) => self.write_all(None),
                Ok(Some(Message::Cut(cut))) => {
                    self.take(cut);
                    if self.retry_at.is_none() {
                        self.write_all(None);
                    }
                }
                Ok(Some(Message::Flush { deadline, done })) => {
                    self.write_all(Some(deadline));
                    // Who asked may have gone.
                    let _ = done.send(self.waiting.len() as u64);
                }
                Ok(None) => {
                    self.write_all(None);
                    return;
                }
            }
        }
    }

    fn take(&mut self, cut: Vec<Batch>) {
        for batch in grouped(cut, self.config.per) {
            let weight = weight(&batch.profile);
            self.waiting_bytes += weight;
            self.waiting.push_back((batch, weight));
        }
        let mut dropped = 0;
        while self.waiting_bytes > self.config.pending
            && let Some((_, weight)) = self.waiting.pop_front()
        {
            self.waiting_bytes -= weight;
            dropped += 1;
        }
        self.counters
            .update(|status| status.dropped.overflow += dropped);
        self.publish();
    }

    /// Tells how much waits. What waits in the inbox is counted there.
    fn publish(&self) {
        let (count, bytes) = (self.waiting.len() as u64, self.waiting_bytes);
        self.counters.update(|status| status.held(count, bytes));
    }

    /// Writes what waits, up to the first failure or, at the latest, the deadline.
    fn write_all(&mut self, deadline: Option<std::time::Instant>) {
        self.retry_at = None;
        while let Some((batch, weight)) = self.waiting.pop_front() {
            if deadline.is_some_and(|deadline| std::time::Instant::now() >= deadline) {
                self.waiting.push_front((batch, weight));
                break;
            }
            match self.write(&batch) {
                Ok((path, size)) => {
                    self.waiting_bytes -= weight;
                    self.backoff.succeeded();
                    self.counters.delivered(size);
                    log::debug!("files: wrote {}", path.display());
                }
                Err((path, error)) => {
                    let text = format!("cannot write {}: {error}", path.display());
                    self.waiting.push_back((batch, weight));
                    self.counters.update(|status| status.retried += 1);
                    self.counters.error(&text);
                    self.retry_at = Some(Instant::now() + self.backoff.failed());
                    break;
                }
            }
        }
        self.publish();
        self.retain();
    }

    fn retain(&mut self) {
        match self.retention.enforce(SystemTime::now()) {
            Ok(removed) => {
                if removed.files > 0 {
                    log::debug!("files: {removed:?}");
                }
                self.counters
                    .update(|status| status.expired += removed.files);
            }
            Err(error) => {
                let directory = self.config.directory.display();
                self.counters
                    .error(&format!("cannot remove old files in {directory}: {error}"));
            }
        }
    }

    /// Writes one profile: its path and size.
    fn write(&mut self, batch: &Batch) -> Result<(PathBuf, u64), (PathBuf, io::Error)> {
        let directory = self.config.directory.join(names::component(&batch.service));
        let pid = batch.process.as_ref().map(|process| process.pid);
        let name = |number| directory.join(names::file(batch.from, pid, number));
        self.write_in(&directory, name, batch)
            .map_err(|error| (name(1), error))
    }

    fn write_in(
        &mut self,
        directory: &Path,
        name: impl Fn(u32) -> PathBuf,
        batch: &Batch,
    ) -> io::Result<(PathBuf, u64)> {
        let (file, directories) = match self.config.fsync {
            Fsync::None => (false, false),
            Fsync::File => (true, false),
            Fsync::FileAndDirectory => (true, true),
        };
        match fs::create_dir(directory) {
            Ok(()) if directories => sync_directory(&self.config.directory)?,
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        // Dropping it removes it.
        let mut temporary = output::temporary_beside(&name(1))?;
        output::buffered(temporary.as_file_mut(), |out| {
            pprof::write(&batch.profile, out)
        })?;
        if file {
            temporary.as_file().sync_all()?;
        }
        let metadata = temporary.as_file().metadata()?;
        let mut number = 1;
        let path = loop {
            let path = name(number);
            match temporary.persist_noclobber(&path) {
                Ok(_) => break path,
                Err(failed) => {
                    let taken = failed.error.kind() == ErrorKind::AlreadyExists;
                    if !taken || number == MAX_NUMBER {
                        return Err(failed.error);
                    }
                    temporary = failed.file;
                    number += 1;
                }
            }
        };
        self.retention
            .add(batch.from, retention::size(&metadata), SystemTime::now());
        if directories {
            sync_directory(directory)?;
        }
        Ok((path, metadata.len()))
    }
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::super::Sinks;
    use super::super::config::Per;
    use super::super::config::SinksConfig;
    use super::super::counters::SinkStatus;
    use super::super::example;
    use super::*;

    fn start(config: FilesConfig) -> Sinks {
        Sinks::start(SinksConfig {
            files: Some(config),
            ..SinksConfig::default()
        })
        .unwrap()
    }

    async fn flush(sinks: &Sinks) -> u64 {
        sinks
            .flush(std::time::Instant::now() + Duration::from_secs(5))
            .await
    }

    fn status(sinks: &Sinks) -> SinkStatus {
        sinks.status().remove(0)
    }

    /// All files, with their directories, in order.
    fn listing(directory: &Path) -> Vec<String> {
        let mut names = Vec::new();
        for service in fs::read_dir(directory).unwrap() {
            let service = service.unwrap();
            for file in fs::read_dir(service.path()).unwrap() {
                let path = file.unwrap().path();
                let name = path.strip_prefix(directory).unwrap();
                names.push(name.to_str().unwrap().to_owned());
            }
        }
        names.sort();
        names
    }

    fn content(path: &Path) -> Vec<u8> {
        let mut content = Vec::new();
        let file = File::open(path).unwrap();
        GzDecoder::new(file).read_to_end(&mut content).unwrap();
        content
    }

    #[tokio::test]
    async fn each_process_has_a_file() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("new/profiles");
        let sinks = start(FilesConfig {
            // The profiles of the example are of 2023.
            max_age: Duration::from_secs(100 * 365 * 86_400),
            fsync: Fsync::FileAndDirectory,
            ..FilesConfig::new(directory.clone())
        });
        let batches = [
            example::batch("web/1", 41, 5),
            example::batch("jobs", 42, 5),
        ];
        sinks.deliver(&batches);
        // An id used again within the same interval.
        sinks.deliver(&[example::batch("jobs", 42, 6)]);
        assert_eq!(flush(&sinks).await, 0);
        assert_eq!(
            listing(&directory),
            [
                "jobs/20231114T221320.250Z-42.2.pb.gz",
                "jobs/20231114T221320.250Z-42.pb.gz",
                "web%2F1/20231114T221320.250Z-41.pb.gz"
            ]
        );
        let mut expected = Vec::new();
        pprof::write(&batches[1].profile, &mut expected).unwrap();
        let written = directory.join("jobs/20231114T221320.250Z-42.pb.gz");
        assert_eq!(fs::read(written).unwrap(), expected);
        let status = status(&sinks);
        assert_eq!((status.delivered, status.errors, status.queued), (3, 0, 0));
    }

    #[tokio::test]
    async fn each_service_has_a_file() {
        let root = tempfile::tempdir().unwrap();
        let sinks = start(FilesConfig {
            per: Per::Service,
            fsync: Fsync::None,
            max_age: Duration::from_secs(100 * 365 * 86_400),
            ..FilesConfig::new(root.path().into())
        });
        sinks.deliver(&[example::batch("web", 1, 5), example::batch("web", 2, 5)]);
        assert_eq!(flush(&sinks).await, 0);
        assert_eq!(listing(root.path()), ["web/20231114T221320.250Z-all.pb.gz"]);
    }

    #[tokio::test]
    async fn retention_is_kept_while_it_runs() {
        let root = tempfile::tempdir().unwrap();
        let leftover = root.path().join("web/.rbprof-Ab12Cd.tmp");
        fs::create_dir(root.path().join("web")).unwrap();
        fs::write(&leftover, "half").unwrap();
        let sinks = start(FilesConfig::new(root.path().into()));
        assert!(!leftover.exists());
        sinks.deliver(&[example::batch("web", 1, 5)]);
        assert_eq!(flush(&sinks).await, 0);
        assert!(listing(root.path()).is_empty(), "a profile of 2023");
        assert_eq!(status(&sinks).expired, 1);
    }

    #[tokio::test]
    async fn what_cannot_be_written_is_written_later() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("profiles");
        let mut config = FilesConfig::new(directory.clone());
        config.max_age = Duration::from_secs(100 * 365 * 86_400);
        let sinks = start(config);
        fs::rename(&directory, root.path().join("away")).unwrap();
        sinks.deliver(&[example::batch("web", 1, 5)]);
        assert_eq!(flush(&sinks).await, 1);
        let failed = status(&sinks);
        assert!(failed.errors >= 1 && failed.retried >= 1, "{failed:?}");
        let error = failed.last_error.unwrap().text;
        assert!(error.contains("No such file or directory"), "{error}");
        assert!(!directory.exists(), "it may be another file system");
        fs::rename(root.path().join("away"), &directory).unwrap();
        let patience = Instant::now() + Duration::from_secs(10);
        while status(&sinks).delivered == 0 && Instant::now() < patience {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(status(&sinks).delivered, 1, "without being asked");
        assert_eq!(status(&sinks).queued, 0);
        assert_eq!(listing(&directory), ["web/20231114T221320.250Z-1.pb.gz"]);
    }

    #[tokio::test]
    async fn the_oldest_is_dropped_where_too_much_waits() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("profiles");
        let one = weight(&example::batch("web", 1, 5).profile);
        let mut config = FilesConfig::new(directory.clone());
        config.max_age = Duration::from_secs(100 * 365 * 86_400);
        config.pending = 64 << 10;
        let fit = config.pending / one;
        let sinks = start(config);
        fs::rename(&directory, root.path().join("away")).unwrap();
        for pid in 1..=30 {
            sinks.deliver(&[example::batch("web", pid, 5)]);
            flush(&sinks).await;
        }
        let status = status(&sinks);
        assert_eq!((status.queued, status.dropped.overflow), (fit, 30 - fit));
        assert!(status.queued_bytes <= 64 << 10);
        fs::rename(root.path().join("away"), &directory).unwrap();
        assert_eq!(flush(&sinks).await, 0);
        assert_eq!(listing(&directory).len() as u64, fit);
        assert!(listing(&directory).iter().any(|name| name.contains("-30.")));
    }

    /// On a small file system of its own.
    #[test]
    fn a_full_disk_leaves_no_partial_file() {
        // Only one who may mount can fill a disk.
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let mounted = Mounted::tmpfs(root.path(), "64k");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut config = FilesConfig::new(root.path().join("profiles"));
            config.max_age = Duration::from_secs(100 * 365 * 86_400);
            let sinks = start(config);
            let fill = root.path().join("fill");
            fs::write(&fill, vec![0; 16 << 10]).unwrap();
            for pid in 1..=30 {
                sinks.deliver(&[example::batch("web", pid, 5)]);
            }
            let left = flush(&sinks).await;
            let full = status(&sinks);
            assert!(left > 0 && left < 30, "{full:?}");
            assert_eq!(full.delivered, 30 - left);
            let error = full.last_error.unwrap().text;
            assert!(error.contains("No space left on device"), "{error}");
            let directory = root.path().join("profiles");
            let names = listing(&directory);
            assert_eq!(names.len() as u64, full.delivered, "{names:?}");
            for name in names {
                assert!(!content(&directory.join(&name)).is_empty(), "{name}");
            }
            fs::remove_file(&fill).unwrap();
            flush(&sinks).await;
            assert!(status(&sinks).delivered > full.delivered);
        });
        drop(mounted);
    }

    struct Mounted(PathBuf);

    impl Mounted {
        fn tmpfs(at: &Path, size: &str) -> Self {
            let mut mount = std::process::Command::new("mount");
            mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]);
            assert!(mount.arg(at).status().unwrap().success());
            Self(at.to_path_buf())
        }
    }

    impl Drop for Mounted {
        fn drop(&mut self) {
            let mut umount = std::process::Command::new("umount");
            let _ = umount.arg("-l").arg(&self.0).status();
        }
    }
}
