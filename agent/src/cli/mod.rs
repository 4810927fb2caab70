//! The subcommands. All but `agent`, `check`, `doctor` and `uninstall` speak to the agent through [`crate::api`] alone.

use std::{ffi::OsString, io, path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::api::{
    DEFAULT_SOCKET,
    client::{Client, ClientError},
};

mod change;
mod doctor;
mod run;
mod status;
mod uninstall;
mod wait;

pub use doctor::doctor;
pub use run::RunError;
pub use uninstall::{UninstallError, uninstall};

/// Success.
pub const EXIT_OK: u8 = 0;
/// Any failure that has no code of its own.
pub const EXIT_FAILURE: u8 = 1;
/// EX_TEMPFAIL: the lease was lost, or is held and `--no-wait` was given.
pub const EXIT_LEASE: u8 = 75;
/// As `timeout` has it.
pub const EXIT_TIMEOUT: u8 = 124;
/// `run` itself failed, as `env` and `timeout` have it.
pub const EXIT_RUN: u8 = 125;
/// The command is there and cannot be executed.
pub const EXIT_CANNOT_EXECUTE: u8 = 126;
/// The command was not found.
pub const EXIT_NOT_FOUND: u8 = 127;

/// Network fencing agent: a service is cut in the kernel at its lease's deadline, with nobody alive to do it.
#[derive(Debug, Parser)]
#[command(name = "portcullis", version, max_term_width = 100)]
pub struct Cli {
    /// The agent's socket.
    #[arg(long, global = true, env = "PORTCULLIS_SOCKET", default_value = DEFAULT_SOCKET, value_name = "PATH")]
    pub socket: PathBuf,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Agent(AgentArgs),
    Check(CheckArgs),
    Doctor(DoctorArgs),
    Uninstall(UninstallArgs),
    #[command(flatten)]
    Client(ClientCommand),
}

/// Run the agent.
///
/// Loads and attaches the kernel programs, adopts what an earlier agent left, and keeps the gates. It starts with every
/// service fenced or as it finds it, and opens nothing without a proven holding. SIGHUP reads the configuration again;
/// SIGTERM ends the agent, and the gates fall at their deadlines.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  portcullis agent
  portcullis agent --config ./portcullis.toml --log debug")]
pub struct AgentArgs {
    #[arg(long, env = "PORTCULLIS_CONFIG", default_value = DEFAULT_CONFIG, value_name = "PATH")]
    pub config: PathBuf,
    /// What to log, in the form of RUST_LOG, which is used if this is absent; default `info`.
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
}

const DEFAULT_CONFIG: &str = "/etc/portcullis/portcullis.toml";

/// Check a configuration file and point at what is wrong with it.
///
/// Touches nothing and needs no agent. Exits with 0 if the file is valid, with 1 if not.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  portcullis check
  portcullis check ./portcullis.toml && portcullis reload")]
pub struct CheckArgs {
    #[arg(env = "PORTCULLIS_CONFIG", default_value = DEFAULT_CONFIG)]
    pub file: PathBuf,
}

/// Find out what this host can and cannot do, and how to mend what it cannot.
///
/// Looks at kernel features, BTF, the bpffs, capabilities, cgroups, the time namespace, the clock's slew rate, the
/// configuration and the state directory, and asks a running agent what is attached to each interface. Changes nothing
/// and needs no agent. Exits with 1 if anything keeps the agent from running.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  portcullis doctor
  portcullis doctor --config ./portcullis.toml")]
pub struct DoctorArgs {
    /// The file to check; it says where the bpffs, the cgroup root and the state directory are. Need not exist.
    #[arg(long, env = "PORTCULLIS_CONFIG", default_value = DEFAULT_CONFIG, value_name = "PATH")]
    pub config: PathBuf,
}

/// Remove everything that agents left in the kernel: THIS OPENS EVERY GATE.
///
/// Detaches and unpins the programs and maps of every version of the agent. From then on nothing on this host is fenced:
/// a service whose lease another node holds is reachable here again, and two nodes may serve at once. Stop the services,
/// or see to it that they hold no authority, before you do this.
///
/// Refuses while an agent runs, and without --opens-gates. Leaves the configuration and the state directory alone. Exits
/// with 0 if nothing is left in the kernel, else with 1.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  systemctl disable --now portcullis && portcullis uninstall --opens-gates")]
pub struct UninstallArgs {
    /// Yes, every gate is to be opened.
    #[arg(long, required = true)]
    pub opens_gates: bool,
    /// The file that says where the pins and the lock are.
    #[arg(long, env = "PORTCULLIS_CONFIG", default_value = DEFAULT_CONFIG, value_name = "PATH")]
    pub config: PathBuf,
}

/// What speaks to a running agent.
#[derive(Debug, Subcommand)]
pub enum ClientCommand {
    Status(StatusArgs),
    Fence(HoldArgs),
    Unfence(UnfenceArgs),
    Wait(WaitArgs),
    ResetMark(ResetMarkArgs),
    /// Apply the configuration file again.
    ///
    /// No gate is opened or closed that the change does not concern. A file that is not valid changes nothing.
    /// Exits with 0 if it was applied, else with 1.
    #[command(after_long_help = "\
Examples:
  portcullis check && portcullis reload")]
    Reload,
    Run(RunArgs),
}

/// Show services, their gates, and what weakens the guarantee.
///
/// Exits with 0 if the agent answered, whatever the state; see `wait` for a test. With --json one object per line:
/// {"health":...,"services":[...],"coverage":...}.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  portcullis status
  portcullis status pg-main --watch
  portcullis status --json | jq '.services[] | select(.state != \"serving\")'")]
pub struct StatusArgs {
    /// Only this service.
    pub service: Option<String>,
    /// Show it again every second until interrupted.
    #[arg(long, short)]
    pub watch: bool,
    #[arg(long)]
    pub json: bool,
}

/// Fence a service by hand: close its gate now and keep it closed.
///
/// Answered when the gate is closed. The lease is left as it is. Nothing opens the service again before `unfence`.
/// Exits with 0 once the gate is closed, else with 1.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  portcullis fence pg-main --reason 'failover drill'
  portcullis fence pg-main --token 1764500000000   # only if this holding is still the current one")]
pub struct HoldArgs {
    pub service: String,
    /// Only if this is the token of the current holding.
    #[arg(long, value_name = "N")]
    pub token: Option<u64>,
    /// For the record and the status.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "TEXT")]
    pub reason: String,
}

/// Remove a fence made by hand.
///
/// Opens nothing by itself: the service serves again when a holding of its lease is proven. Exits with 0 if the hold is
/// gone, else with 1.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  portcullis unfence pg-main --reason 'drill is over'
  portcullis unfence pg-main && portcullis wait pg-main --for serving")]
pub struct UnfenceArgs {
    #[command(flatten)]
    pub hold: HoldArgs,
}

/// Set the high-water token of a service, after its lease store was restored from a backup.
///
/// A token below the mark never opens a service; a restored store may grant such tokens. Lower the mark only when no
/// holder of a higher token can be alive anywhere. The service must be fenced. Who did this and when is kept for ever.
/// Exits with 0 if the mark is set, else with 1.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  portcullis fence pg-main && portcullis reset-mark pg-main --to 0 --reason 'etcd restored from last night'")]
pub struct ResetMarkArgs {
    pub service: String,
    /// The new mark; tokens from it on open the service.
    #[arg(long, value_name = "N")]
    pub to: u64,
    /// For the record.
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Wait until a service has reached a state.
///
/// Waits for the agent as well if it is not running yet. Exits with 0 once the state is reached, with 124 if the time is
/// over before that, with 1 if there is no such service or the agent refuses.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  portcullis wait pg-main
  portcullis wait pg-main --for confirmed --timeout 30s")]
pub struct WaitArgs {
    pub service: String,
    #[arg(long = "for", value_enum, default_value_t = Goal::Serving, value_name = "STATE")]
    pub goal: Goal,
    /// Such as 500ms, 10s, 2m.
    #[arg(long, default_value = "10s", value_parser = parse_duration, value_name = "TIME")]
    pub timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Goal {
    /// The gate is open.
    Serving,
    /// The gate is closed and every effect was carried out.
    Fenced,
    /// Fenced, and confirmed on the rejected side.
    Confirmed,
}

/// Hold a service's lease while a command runs, as flock does with a file.
///
/// Acquires the local lease of SERVICE, waits until the service is serving, starts the command with its token in
/// PORTCULLIS_TOKEN and the service in PORTCULLIS_SERVICE, and renews every third of the TTL. When the command ends, the
/// lease is released and the command's exit status passed on.
///
/// A restart of the agent is ridden out for as long as the lease has time left. If the lease is lost, the command gets
/// SIGTERM, then SIGKILL after --kill-after. The gate does not wait for that: it falls at the deadline, even if this
/// process is stopped or killed. The command is killed if this process dies (but not if it is set-user-id).
///
/// SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 and SIGWINCH are passed to the command. What the terminal sends
/// reaches the command directly, since both are in one process group; it is not sent twice. Ctrl-Z stops both: the lease
/// then runs out, and is lost when they continue.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Exit status:
  the command's own, or 128 + N if signal N ended it
  75   the lease was lost; or it is held by another and --no-wait was given
  125  this program failed, or was refused
  126  the command cannot be executed
  127  the command was not found
  128 + N  signal N came before the command was started

Examples:
  portcullis run vip-web --ttl 5s -- nginx -g 'daemon off;'
  portcullis run backup --ttl 30s --no-wait -- /usr/local/bin/backup
  portcullis run pg-main --ttl 10s --kill-after 3s -- sh -c 'echo \"my token is $PORTCULLIS_TOKEN\"; exec postgres'")]
pub struct RunArgs {
    pub service: String,
    /// For how long each renewal holds the lease, such as 5s; cut to the service's ttl_cap.
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub ttl: Duration,
    /// Who holds the lease, for the status. Default: the host name and this process's id.
    #[arg(long, value_name = "ID")]
    pub holder: Option<String>,
    /// Wait while another holds the lease or the agent is not running; the default.
    #[arg(long, overrides_with = "no_wait")]
    pub wait: bool,
    /// Exit with 75 at once if another holds the lease.
    #[arg(long)]
    pub no_wait: bool,
    /// After the loss of the lease: the time from SIGTERM to SIGKILL.
    #[arg(long, default_value = "5s", value_parser = parse_duration, value_name = "TIME")]
    pub kill_after: Duration,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// Why a subcommand failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Uninstall(#[from] UninstallError),
    #[error("cannot write to standard output: {0}")]
    Output(#[from] io::Error),
}

impl CliError {
    /// The exit status that stands for it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Client(_) | Self::Uninstall(_) | Self::Output(_) => EXIT_FAILURE,
            Self::Run(error) => error.exit_code(),
        }
    }
}

/// Carries out a subcommand that speaks to the agent. Must run on the main thread: the command of `run` dies with the
/// thread that started it.
pub async fn execute(command: ClientCommand, socket: PathBuf) -> Result<ExitCode, CliError> {
    let client = Client::new(socket);
    let code = match command {
        ClientCommand::Status(args) => status::status(&client, &args).await,
        ClientCommand::Fence(args) => change::fence(&client, args).await,
        ClientCommand::Unfence(args) => change::unfence(&client, args.hold).await,
        ClientCommand::Wait(args) => wait::wait(&client, &args).await,
        ClientCommand::ResetMark(args) => change::reset_mark(&client, args).await,
        ClientCommand::Reload => change::reload(&client).await,
        ClientCommand::Run(args) => run::run(&client, &args).await.map_err(CliError::Run),
    };
    match code {
        // `portcullis status | head -1`: the reader had enough.
        Err(CliError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        other => other.map(ExitCode::from),
    }
}

/// A duration as in the configuration: a whole number and `ms`, `s`, `m` or `h`.
fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| DurationError)?;
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(DurationError),
    };
    number.checked_mul(unit_ms).filter(|ms| *ms > 0).map(Duration::from_millis).ok_or(DurationError)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write a whole number above 0 and a unit: 500ms, 5s, 2m or 1h")]
struct DurationError;

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_subcommand_has_examples() {
        for command in Cli::command().get_subcommands() {
            let help = command.clone().render_long_help().to_string();
            assert!(help.contains("Examples:"), "{}", command.get_name());
        }
    }

    #[test]
    fn the_command_of_run_follows_two_dashes() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' '));
        let parsed = parse("portcullis run web --ttl 5s -- sleep --help").expect("valid");
        let Command::Client(ClientCommand::Run(args)) = parsed.command else { panic!("another subcommand") };
        assert_eq!(args.command, ["sleep", "--help"]);
        assert_eq!(args.ttl, Duration::from_secs(5));
        assert!(parse("portcullis run web --ttl 5s").is_err());
        assert!(parse("portcullis run web --ttl 5s sleep 1").is_err());
        assert!(parse("portcullis run web -- sleep 1").is_err());
    }

    #[test]
    fn nobody_uninstalls_by_accident() {
        assert!(Cli::try_parse_from(["portcullis", "uninstall"]).is_err());
        assert!(Cli::try_parse_from(["portcullis", "uninstall", "--opens-gates"]).is_ok());
    }

    #[test]
    fn durations() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        for wrong in ["", "5", "s", "0s", "-1s", "1.5s", "5 s", "99999999999999999999s", "18446744073709551615h"] {
            assert_eq!(parse_duration(wrong), Err(DurationError), "{wrong}");
        }
    }
}
