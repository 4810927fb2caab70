//! `fence`, `unfence`, `reset-mark` and `reload`.

use std::io::{self, Write as _};

use super::{CliError, EXIT_OK, HoldArgs, ResetMarkArgs};
use crate::api::{
    client::Client,
    types::{HoldRequest, MarkRequest},
};

pub(super) async fn fence(client: &Client, args: HoldArgs) -> Result<u8, CliError> {
    let request = HoldRequest { token: args.token, reason: args.reason };
    client.fence(&args.service, &request).await?;
    writeln!(io::stdout(), "{}: the gate is closed, and stays closed until `portcullis unfence`", args.service)?;
    Ok(EXIT_OK)
}

pub(super) async fn unfence(client: &Client, args: HoldArgs) -> Result<u8, CliError> {
    let request = HoldRequest { token: args.token, reason: args.reason };
    client.unfence(&args.service, &request).await?;
    writeln!(io::stdout(), "{}: no longer fenced by hand; it serves once a holding is proven", args.service)?;
    Ok(EXIT_OK)
}

pub(super) async fn reset_mark(client: &Client, args: ResetMarkArgs) -> Result<u8, CliError> {
    let request = MarkRequest { mark: args.to, reason: args.reason };
    client.reset_mark(&args.service, &request).await?;
    writeln!(io::stdout(), "{}: tokens from {} on open it", args.service, args.to)?;
    Ok(EXIT_OK)
}

pub(super) async fn reload(client: &Client) -> Result<u8, CliError> {
    let reloaded = client.reload().await?;
    let mut out = io::stdout().lock();
    let lists = [("added", &reloaded.added), ("changed", &reloaded.changed), ("removed", &reloaded.removed)];
    if lists.iter().all(|(_, services)| services.is_empty()) {
        writeln!(out, "no service changed")?;
    }
    for (what, services) in lists.into_iter().filter(|(_, services)| !services.is_empty()) {
        writeln!(out, "{what}: {}", services.join(", "))?;
    }
    for setting in &reloaded.needs_restart {
        writeln!(out, "{setting}: takes effect when the agent is restarted")?;
    }
    Ok(EXIT_OK)
}
