//! Named points at which tests kill the process, to prove that a crash at any instant opens nothing.

/// Aborts here if `PORTCULLIS_CRASH_AT` names this point.
#[cfg(feature = "crash-points")]
pub fn point(name: &str) {
    if std::env::var_os("PORTCULLIS_CRASH_AT").is_some_and(|wanted| wanted == name) {
        std::process::abort();
    }
}

/// Nothing: crash points exist in test builds only.
#[cfg(not(feature = "crash-points"))]
#[inline(always)]
pub fn point(_name: &str) {}
