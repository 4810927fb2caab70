//! Where log lines go: to the journal when systemd started us, with their fields, else to standard error.

use std::{io, os::linux::fs::MetadataExt as _};

use tracing_subscriber::{
    EnvFilter, Layer as _, Registry, filter::ParseError, layer::SubscriberExt as _, util::SubscriberInitExt as _,
};

/// Why there is no log.
#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    #[error("`{filter}` is no log filter: {source}. Try `info`, or `info,portcullis=debug`")]
    Filter { filter: String, source: ParseError },
    #[error("cannot reach the journal: {0}. Check systemd-journald, or unset JOURNAL_STREAM")]
    Journal(#[source] io::Error),
    #[error("a log is set up already: {0}")]
    Twice(#[from] tracing_subscriber::util::TryInitError),
}

/// Sets the log up, once per process. `filter` is in the form of RUST_LOG, which is used if it is absent; default `info`.
pub fn init(filter: Option<&str>) -> Result<(), LoggingError> {
    let filter =
        filter.map(str::to_owned).or_else(|| std::env::var("RUST_LOG").ok()).filter(|filter| !filter.is_empty());
    let filter = filter.unwrap_or_else(|| "info".to_owned());
    let filter = EnvFilter::try_new(&filter).map_err(|source| LoggingError::Filter { filter, source })?;
    let layer = if stderr_is_journal(std::env::var("JOURNAL_STREAM").ok().as_deref(), stderr_device_and_inode()) {
        let journal = tracing_journald::layer().map_err(LoggingError::Journal)?;
        journal.with_syslog_identifier("portcullis".into()).boxed()
    } else {
        let terminal = io::IsTerminal::is_terminal(&io::stderr());
        tracing_subscriber::fmt::layer::<Registry>().with_writer(io::stderr).with_ansi(terminal).boxed()
    };
    Ok(tracing_subscriber::registry().with(layer.with_filter(filter)).try_init()?)
}

/// systemd names the device and inode of the journal's socket; standard error may have been redirected since.
fn stderr_is_journal(journal_stream: Option<&str>, stderr: Option<(u64, u64)>) -> bool {
    let named = journal_stream.and_then(|value| value.split_once(':'));
    let named = named.and_then(|(device, inode)| Some((device.parse().ok()?, inode.parse().ok()?)));
    named.is_some() && named == stderr
}

fn stderr_device_and_inode() -> Option<(u64, u64)> {
    let metadata = std::fs::metadata("/proc/self/fd/2").ok()?;
    Some((metadata.st_dev(), metadata.st_ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_journal_is_used_only_if_standard_error_is_its_stream() {
        assert!(stderr_is_journal(Some("8:1234"), Some((8, 1234))));
        assert!(!stderr_is_journal(Some("8:1234"), Some((8, 1235))));
        assert!(!stderr_is_journal(Some("8:x"), Some((8, 1234))));
        assert!(!stderr_is_journal(Some(""), None));
        assert!(!stderr_is_journal(None, None));
    }
}
