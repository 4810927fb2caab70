//! The test world: hosts made of network namespaces, agents inside them, counted traffic between them.
//!
//! * [`world`]: namespaces, links, cgroups, bpffs, processes and agents; everything is removed when its world is dropped.
//! * [`traffic`]: generators that stamp packets and judges that count them on the other side.
//! * [`residue`]: what a test run may leave behind on the machine, and its removal.
//! * [`story`]: what most stories begin with.
//! * [`report`]: what a story or a benchmark answers.
//! * [`show`]: what a demonstration shows a person.
//! * [`bench`]: what the benchmarks of the kernel programs share.
//! * [`clock`]: the boot clock, in which everything is told.
//!
//! The harness panics where an ordinary library would return an error: a test has no better answer to a link that
//! cannot be made, and its story stays readable.

pub mod bench;
pub mod clock;
pub mod report;
pub mod residue;
pub mod show;
pub mod story;
pub mod traffic;
pub mod world;
