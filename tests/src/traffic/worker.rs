//! The threads of generators and judges.

use std::{
    io,
    thread::{self, JoinHandle},
};

/// A named thread that ends with a result.
#[derive(Debug)]
pub(super) struct Worker<T>(JoinHandle<io::Result<T>>);

impl<T: Send + 'static> Worker<T> {
    pub(super) fn start(name: &str, work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Self {
        let thread = thread::Builder::new().name(name.to_owned()).spawn(work);
        Self(thread.unwrap_or_else(|e| panic!("start the thread {name}: {e}")))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// Its own, or that it panicked.
    pub(super) fn join(self) -> io::Result<T> {
        self.0.join().unwrap_or_else(|_| Err(io::Error::other("its thread panicked")))
    }
}
