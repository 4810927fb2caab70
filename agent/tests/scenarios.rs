//! Readable stories of one service: `tests/scenarios/*.txt`.
//!
//! A story is a list of inputs, each followed by `----`, what the machine did, and what it shows (`=`).
//! `UPDATE=1 cargo test` rewrites the answers; read the difference before committing it. Instants and spans are
//! milliseconds.
//!
//! ```text
//! settings ttl_cap=20000 margin=1000 drift_ppm=100000 when_store_lost=fence
//! 10000 start deadline=0 generation=0 token=0 mark=0 hold=false
//! 10001 done verified confirmed:no packet passed
//! 10010 proven sent=10005 ttl=10000 token=5 seq=1
//! ```
//!
//! A completion belongs to the newest epoch that an action carried, unless it says `epoch=N`.

#![allow(clippy::unwrap_used)]

use std::{collections::BTreeMap, env, fmt::Write as _, fs, path::Path, time::Duration};

use portcullis::{
    config::model::StoreLost,
    core::{
        deadline::{Proof, Timing},
        machine::{
            Action, Confirmation, Epoch, Event, Expect, Found, Input, Loss, Machine, Outcome, Reason, Settings, View,
        },
        time::BootInstant,
    },
};

#[test]
fn scenarios() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let mut paths: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "txt"));
    paths.sort();
    assert!(paths.len() >= 12, "only {} stories in {}", paths.len(), folder.display());
    let update = env::var_os("UPDATE").is_some();
    let mut different = Vec::new();
    for path in paths {
        let told = fs::read_to_string(&path).unwrap();
        let played = play(&told);
        if update {
            fs::write(&path, played).unwrap();
        } else if told != played {
            let same = told.lines().zip(played.lines()).take_while(|(told, played)| told == played).count();
            let at = |story: &str| story.lines().nth(same).unwrap_or("(the end)").to_owned();
            different.push(format!(
                "{}:{}\n  told:   {}\n  played: {}",
                path.display(),
                same + 1,
                at(&told),
                at(&played)
            ));
        }
    }
    assert!(different.is_empty(), "stories differ, UPDATE=1 rewrites them:\n{}", different.join("\n"));
}

/// The story with its answers replaced by what the machine does.
fn play(story: &str) -> String {
    let mut played = String::new();
    let mut settings = None;
    let mut machine: Option<Machine> = None;
    let mut newest = Epoch::default();
    let mut in_answer = false;
    for line in story.lines() {
        // An answer runs from its line to the next empty one.
        if in_answer || line == "----" {
            in_answer = !line.is_empty();
            continue;
        }
        writeln!(played, "{line}").unwrap();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(words) = line.strip_prefix("settings ") {
            settings = Some(parse_settings(&Words::of(words)));
            continue;
        }
        let (at, input) = line.split_once(' ').unwrap_or_else(|| panic!("no input in {line:?}"));
        let now = instant(at);
        let actions = if let Some(words) = input.strip_prefix("start ") {
            let found = parse_found(&Words::of(words));
            let (started, actions) = Machine::adopt(settings.expect("settings come first"), now, found);
            machine = Some(started);
            actions
        } else {
            machine.as_mut().expect("start comes first").step(now, parse_input(input, newest))
        };
        writeln!(played, "----").unwrap();
        for action in &actions {
            newest = epoch_of(action).unwrap_or(newest);
            writeln!(played, "{}", action_line(action)).unwrap();
        }
        let machine = machine.as_ref().expect("started above");
        writeln!(played, "= {}\n", view_line(&machine.view(), machine.wake_at())).unwrap();
    }
    played
}

/// `key=value` pairs, and the rest of the line after them.
struct Words<'a> {
    pairs: BTreeMap<&'a str, &'a str>,
    rest: &'a str,
}

impl<'a> Words<'a> {
    fn of(mut line: &'a str) -> Self {
        let mut pairs = BTreeMap::new();
        loop {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            let Some((key, value)) = word.split_once('=') else { return Self { pairs, rest: line } };
            pairs.insert(key, value);
            line = rest;
        }
    }

    fn get(&self, key: &str) -> Option<&'a str> {
        self.pairs.get(key).copied()
    }

    fn number(&self, key: &str) -> u64 {
        let value = self.get(key).unwrap_or_else(|| panic!("{key}= is missing"));
        value.parse().unwrap_or_else(|_| panic!("{key}={value} is no number"))
    }

    fn instant(&self, key: &str) -> BootInstant {
        BootInstant::from_nanos(self.number(key) * 1_000_000)
    }

    fn duration(&self, key: &str) -> Duration {
        Duration::from_millis(self.number(key))
    }

    fn flag(&self, key: &str) -> bool {
        self.get(key) == Some("true")
    }

    fn token(&self) -> Option<u64> {
        self.get("token").map(|_| self.number("token"))
    }
}

fn instant(text: &str) -> BootInstant {
    let ms: u64 = text.parse().unwrap_or_else(|_| panic!("{text:?} is no instant"));
    BootInstant::from_nanos(ms * 1_000_000)
}

fn parse_settings(words: &Words) -> Settings {
    let drift_ppm = u32::try_from(words.number("drift_ppm")).unwrap();
    let when_store_lost = match words.get("when_store_lost") {
        Some("hold") => StoreLost::Hold,
        Some("fence") => StoreLost::Fence,
        other => panic!("when_store_lost={other:?}"),
    };
    let timing = Timing { ttl_cap: words.duration("ttl_cap"), margin: words.duration("margin"), drift_ppm };
    Settings { timing, when_store_lost }
}

fn parse_found(words: &Words) -> Found {
    Found {
        deadline: words.instant("deadline"),
        generation: words.instant("generation"),
        token: words.number("token"),
        high_water: words.number("mark"),
        hold: words.flag("hold"),
    }
}

fn parse_input(input: &str, newest: Epoch) -> Input {
    let (verb, rest) = input.split_once(' ').unwrap_or((input, ""));
    let words = Words::of(rest);
    let text = words.rest.to_owned();
    let epoch = words.get("epoch").map_or(newest, |_| Epoch(words.number("epoch")));
    match verb {
        "proven" => Input::Proven(Proof {
            sent_at: words.instant("sent"),
            ttl: words.duration("ttl"),
            token: words.number("token"),
            sequence: words.number("seq"),
        }),
        "lost" => Input::Lost {
            token: words.number("token"),
            loss: match words.rest {
                "released" => Loss::Released,
                "deleted" => Loss::Deleted,
                "expired" => Loss::Expired,
                "other holder" => Loss::OtherHolder,
                other => panic!("lost: {other:?}"),
            },
        },
        "store-silent" => Input::StoreSilent,
        "fence" => Input::Fence { token: words.token(), reason: text, hold: words.flag("hold") },
        "unfence" => Input::Unfence { token: words.token() },
        "reset-mark" => Input::ResetMark { mark: words.number("mark") },
        "clock-unfit" => Input::ClockUnfit { why: text },
        "clock-fit" => Input::ClockFit,
        "tick" => Input::Tick,
        "gate-written" => Input::GateWritten { found: words.instant("found") },
        "renew-refused" => Input::RenewRefused { epoch },
        "shutdown" => Input::Shutdown,
        "done" => Input::Done { epoch, outcome: parse_outcome(&text) },
        other => panic!("unknown input {other:?}"),
    }
}

/// `persisted`, `dropped`, `passed`, each also with `not` and `:why`; `verified confirmed:evidence`.
fn parse_outcome(text: &str) -> Outcome {
    let (what, why) = text.split_once(':').unwrap_or((text, ""));
    let failed = || Err(why.to_owned());
    let evidence = if why.is_empty() { Vec::new() } else { vec![why.to_owned()] };
    match what {
        "persisted" => Outcome::MarkPersisted(Ok(())),
        "not persisted" => Outcome::MarkPersisted(failed()),
        "dropped" => Outcome::SelfTested { expect: Expect::Drop, result: Ok(()) },
        "not dropped" => Outcome::SelfTested { expect: Expect::Drop, result: failed() },
        "passed" => Outcome::SelfTested { expect: Expect::Pass, result: Ok(()) },
        "not passed" => Outcome::SelfTested { expect: Expect::Pass, result: failed() },
        "verified confirmed" => Outcome::Verified(Confirmation::Confirmed(evidence)),
        "verified unconfirmed" => Outcome::Verified(Confirmation::Unconfirmed(evidence)),
        "verified failed" => Outcome::Verified(Confirmation::Failed(evidence)),
        other => panic!("unknown outcome {other:?}"),
    }
}

fn epoch_of(action: &Action) -> Option<Epoch> {
    match action {
        Action::PersistMark { epoch, .. }
        | Action::SelfTest { epoch, .. }
        | Action::Open { epoch, .. }
        | Action::Renew { epoch, .. }
        | Action::Verify { epoch } => Some(*epoch),
        Action::Close { .. } | Action::Bar { .. } | Action::PersistHold { .. } | Action::Record(_) => None,
    }
}

fn ms(instant: BootInstant) -> String {
    let nanos = instant.as_nanos();
    match nanos % 1_000_000 {
        0 => (nanos / 1_000_000).to_string(),
        rest => format!("{}+{rest}ns", nanos / 1_000_000),
    }
}

fn action_line(action: &Action) -> String {
    match action {
        Action::Close { reason } => format!("CLOSE: {reason}"),
        Action::PersistMark { epoch, token } => format!("persist mark {token} (epoch {})", epoch.0),
        Action::Bar { below } => format!("bar tokens below {below}"),
        Action::PersistHold { held } => format!("persist hold {held}"),
        Action::SelfTest { epoch, expect: Expect::Drop } => format!("self-test, must drop (epoch {})", epoch.0),
        Action::SelfTest { epoch, expect: Expect::Pass } => format!("self-test, must pass (epoch {})", epoch.0),
        Action::Open { epoch, generation, token, deadline } => {
            let (deadline, generation) = (ms(*deadline), ms(*generation));
            format!("OPEN token {token} until {deadline}, generation {generation} (epoch {})", epoch.0)
        }
        Action::Renew { epoch, deadline, basis } => {
            format!("RENEW until {}, {basis} (epoch {})", ms(*deadline), epoch.0)
        }
        Action::Verify { epoch } => format!("verify (epoch {})", epoch.0),
        Action::Record(event) => format!("record: {}", event_line(event)),
    }
}

fn event_line(event: &Event) -> String {
    match event {
        Event::Adopted { token, deadline } => format!("adopted open, token {token}, until {}", ms(*deadline)),
        Event::Moved { from, to, token, reason } => {
            let token = token.map(|token| format!(", token {token}")).unwrap_or_default();
            format!("{from} -> {to}{token}{}", because(reason.as_ref()))
        }
        Event::Verified(confirmation) => confirmation_line(confirmation),
        Event::Refused(refusal) => format!("refused: {refusal}"),
        Event::Hold { held, reason } => {
            format!("hold {held}{}", reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default())
        }
        Event::MarkReset { from, to } => format!("mark reset from {from} to {to}"),
        Event::StoreSilent { hold_over } => format!("store silent, hold over: {hold_over}"),
        Event::HeldOver { until } => format!("held over without a proof until {}", ms(*until)),
        Event::HeldButCut { token, why } => format!("held but cut, token {token}: {why}"),
        Event::GateWritten { found } => format!("somebody else wrote {} to the gate", ms(*found)),
        Event::ClockUnfit { why } => format!("clock unfit: {why}"),
        Event::ClockFit => "clock fit".to_owned(),
        Event::Shutdown => "shutdown".to_owned(),
    }
}

fn because(reason: Option<&Reason>) -> String {
    reason.map(|reason| format!(": {reason}")).unwrap_or_default()
}

fn confirmation_line(confirmation: &Confirmation) -> String {
    let (verdict, evidence) = match confirmation {
        Confirmation::Confirmed(evidence) => ("confirmed", evidence),
        Confirmation::Unconfirmed(evidence) => ("unconfirmed", evidence),
        Confirmation::Failed(evidence) => ("failed", evidence),
    };
    format!("{verdict} {evidence:?}")
}

fn view_line(view: &View, wake_at: Option<BootInstant>) -> String {
    let mut line = format!("{} since {}, mark {}", view.state, ms(view.since), view.mark);
    let mut say = |what: &str, value: Option<String>| {
        if let Some(value) = value {
            write!(line, ", {what} {value}").unwrap();
        }
    };
    say("token", view.token.map(|token| token.to_string()));
    say("until", view.deadline.map(ms));
    say("basis", view.basis.map(|basis| basis.to_string()));
    say("fence", view.confirmation.as_ref().map(confirmation_line));
    say("hold", view.hold.then(|| "true".to_owned()));
    say("ALARM", view.alarm.as_ref().map(|alarm| format!("{alarm:?}")));
    say("wake at", wake_at.map(ms));
    line
}
