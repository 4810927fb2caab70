use portcullis_tests::story::{Story, run_for};
use std::time::Duration;
#[test]
fn term() {
    let story = Story::new("term");
    let mut holder = story.hold("2s");
    run_for(Duration::from_millis(200));
    holder.signal(rustix::process::Signal::TERM);
    run_for(Duration::from_millis(1000));
    let pid = holder.pid();
    println!("{:?} {}", holder.ended(), std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default());
    println!("{}", std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default());
    for p in story.node.cgroup().processes() {
        println!(
            "{p} {} {}",
            std::fs::read_to_string(format!("/proc/{p}/cmdline")).unwrap_or_default(),
            std::fs::read_to_string(format!("/proc/{p}/wchan")).unwrap_or_default()
        );
    }
    println!("{}", story.status());
}
#[test]
fn sigs() {
    let story = Story::new("term");
    let holder = story.hold("2s");
    run_for(Duration::from_millis(200));
    for p in story.node.cgroup().processes() {
        println!("{p} {}", std::fs::read_to_string(format!("/proc/{p}/status")).unwrap_or_default());
    }
}
