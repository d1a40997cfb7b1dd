//! Layer 3: one-time schedules of EventBridge Scheduler that terminate one instance.

use aws_sdk_scheduler::{
    Client,
    error::ProvideErrorMetadata,
    operation::{create_schedule::builders::CreateScheduleFluentBuilder, get_schedule::GetScheduleOutput},
    types::{
        ActionAfterCompletion, DeadLetterConfig, FlexibleTimeWindow, FlexibleTimeWindowMode, RetryPolicy,
        ScheduleState, Target,
    },
};
use drums_common::clock::Micros;
use drums_provider::{
    cloud::{KillSchedule, ScheduleName, ScheduleSetup},
    failure::{CloudError, FailureKind},
    words::{InstanceId, Region, instant_text, read_instant},
};
use serde::{Deserialize, Serialize};

use crate::{
    Ec2, aws,
    failed::{failed, unreadable},
};

const GET: &str = "GetSchedule";
/// What fails is tried again for a day, as long as Scheduler does.
const RETRY_AGE_S: i32 = 86_400;
const RETRIES: i32 = 185;
/// A schedule that is made to see whether one can be: disabled, far away, and of an instance that cannot be.
const PROOF: &str = "proof";
const PROOF_INSTANCE: &str = "i-00000000000000000";
const PROOF_AT: Micros = Micros(4_102_444_800_000_000);

/// The target's input, as `TerminateInstances` takes it.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", deny_unknown_fields)]
struct Input {
    instance_ids: Vec<InstanceId>,
}

/// All that a schedule is. The SDK has a builder of its own for each of the two requests that say it.
macro_rules! whole {
    ($request:expr, $name:expr, $wanted:expr) => {
        $request
            .name($name)
            .group_name(&$wanted.setup.group)
            .schedule_expression(expression($wanted.at))
            .schedule_expression_timezone("UTC")
            .flexible_time_window(on_time()?)
            .target(target($wanted)?)
            .state(state($wanted.enabled))
            .action_after_completion(ActionAfterCompletion::None)
    };
}

/// The request that makes it, where none of that name is there.
pub(crate) fn creation(
    client: &Client,
    name: &str,
    wanted: &KillSchedule,
) -> Result<CreateScheduleFluentBuilder, CloudError> {
    Ok(whole!(client.create_schedule(), name, wanted))
}

impl Ec2 {
    pub(crate) async fn make_schedule(&self, wanted: &KillSchedule) -> Result<(), CloudError> {
        self.write_schedule(wanted.name.as_str(), wanted).await
    }

    async fn write_schedule(&self, name: &str, wanted: &KillSchedule) -> Result<(), CloudError> {
        let client = self.connect.scheduler(&wanted.region);
        match creation(&client, name, wanted)?.send().await {
            Ok(_) => Ok(()),
            Err(e) if e.code() != Some("ConflictException") => Err(failed("CreateSchedule", e)),
            // There is one of that name: it becomes this one.
            Err(_) => {
                let update = whole!(client.update_schedule(), name, wanted);
                update.send().await.map(drop).map_err(|e| failed("UpdateSchedule", e))
            }
        }
    }

    pub(crate) async fn read_schedule(
        &self,
        region: &Region,
        name: &ScheduleName,
        setup: &ScheduleSetup,
    ) -> Result<Option<KillSchedule>, CloudError> {
        let client = self.connect.scheduler(region);
        match client.get_schedule().name(name.as_str()).group_name(&setup.group).send().await {
            Ok(seen) => read(region, name, setup, &seen).map(Some),
            Err(e) if e.code() == Some("ResourceNotFoundException") => Ok(None),
            Err(e) => Err(failed(GET, e)),
        }
    }

    pub(crate) async fn remove_schedule(&self, region: &Region, name: &str, group: &str) -> Result<(), CloudError> {
        match self.connect.scheduler(region).delete_schedule().name(name).group_name(group).send().await {
            Ok(_) => Ok(()),
            Err(e) if e.code() == Some("ResourceNotFoundException") => Ok(()),
            Err(e) => Err(failed("DeleteSchedule", e)),
        }
    }

    pub(crate) async fn try_schedules(&self, region: &Region, setup: &ScheduleSetup) -> Result<String, CloudError> {
        let proof = KillSchedule {
            // Not a token's text, so only the name under which it is written counts.
            name: ScheduleName::of(&PROOF_TOKEN.parse().map_err(|e| unreadable(GET, e))?),
            region: region.clone(),
            setup: setup.clone(),
            instance: aws::named(GET, PROOF_INSTANCE)?,
            at: PROOF_AT,
            enabled: false,
        };
        self.write_schedule(PROOF, &proof).await?;
        let seen = self.connect.scheduler(region).get_schedule().name(PROOF).group_name(&setup.group).send().await;
        let seen = seen.map_err(|e| failed(GET, e)).and_then(|seen| read(region, &proof.name, setup, &seen));
        // It goes away also where it was not as it was made.
        let gone = self.remove_schedule(region, PROOF, &setup.group).await;
        let seen = seen?;
        if seen != proof {
            let text = format!("{seen:?} was read back where {proof:?} had been made");
            return Err(CloudError::new(FailureKind::Invalid, GET, text));
        }
        gone?;
        Ok(format!("a disabled schedule was made in group {}, read back and deleted", setup.group))
    }
}

/// No token of any host: of an installation, a deadline and a host that nobody has.
const PROOF_TOKEN: &str = "drums1-00000000-0000000001-0000000000000000-0000";

fn expression(at: Micros) -> String {
    format!("at({})", instant_text(at).trim_end_matches('Z'))
}

fn state(enabled: bool) -> ScheduleState {
    if enabled { ScheduleState::Enabled } else { ScheduleState::Disabled }
}

fn on_time() -> Result<FlexibleTimeWindow, CloudError> {
    let window = FlexibleTimeWindow::builder().mode(FlexibleTimeWindowMode::Off).build();
    window.map_err(|e| CloudError::new(FailureKind::Invalid, "CreateSchedule", e.to_string()))
}

/// Of the partition that the role is in: China's and the government's have ARNs of their own.
fn universal_target(role_arn: &str) -> String {
    let partition = role_arn.split(':').nth(1).unwrap_or("aws");
    format!("arn:{partition}:scheduler:::aws-sdk:ec2:terminateInstances")
}

fn target(wanted: &KillSchedule) -> Result<Target, CloudError> {
    let invalid = |e: &dyn std::fmt::Display| CloudError::new(FailureKind::Invalid, "CreateSchedule", e.to_string());
    let input = serde_json::to_string(&Input { instance_ids: vec![wanted.instance.clone()] });
    Target::builder()
        .arn(universal_target(&wanted.setup.role_arn))
        .role_arn(&wanted.setup.role_arn)
        .input(input.map_err(|e| invalid(&e))?)
        .dead_letter_config(DeadLetterConfig::builder().arn(&wanted.setup.dead_letter_arn).build())
        .retry_policy(
            RetryPolicy::builder().maximum_event_age_in_seconds(RETRY_AGE_S).maximum_retry_attempts(RETRIES).build(),
        )
        .build()
        .map_err(|e| invalid(&e))
}

/// What is there under that name. It may differ from what we made: then it is told as it is, or as what cannot be read.
fn read(
    region: &Region,
    name: &ScheduleName,
    setup: &ScheduleSetup,
    seen: &GetScheduleOutput,
) -> Result<KillSchedule, CloudError> {
    let expression = aws::given(GET, "expression", seen.schedule_expression())?;
    let at =
        expression.strip_prefix("at(").and_then(|e| e.strip_suffix(')')).and_then(|e| read_instant(&format!("{e}Z")));
    let at = at.ok_or_else(|| unreadable(GET, format!("{expression} is not a one-time schedule's time")))?;
    if !matches!(seen.schedule_expression_timezone(), None | Some("UTC")) {
        return Err(unreadable(GET, format!("its time is of {:?}", seen.schedule_expression_timezone())));
    }
    let late = seen.flexible_time_window().map(FlexibleTimeWindow::mode);
    if late != Some(&FlexibleTimeWindowMode::Off) {
        return Err(unreadable(GET, format!("its time window is {late:?}: it may fire late")));
    }
    let target = aws::given(GET, "target", seen.target())?;
    if target.arn() != universal_target(target.role_arn()) {
        return Err(unreadable(GET, format!("its target is {}", target.arn())));
    }
    let input: Input = serde_json::from_str(target.input().unwrap_or_default())
        .map_err(|e| unreadable(GET, format!("its input names no instances: {e}")))?;
    let [instance] = input.instance_ids.as_slice() else {
        return Err(unreadable(GET, format!("it names {} instances", input.instance_ids.len())));
    };
    let dead_letters = target.dead_letter_config().and_then(DeadLetterConfig::arn).unwrap_or_default();
    Ok(KillSchedule {
        name: name.clone(),
        region: region.clone(),
        setup: ScheduleSetup {
            group: seen.group_name().unwrap_or(&setup.group).to_owned(),
            role_arn: target.role_arn().to_owned(),
            dead_letter_arn: dead_letters.to_owned(),
        },
        instance: instance.clone(),
        at,
        enabled: seen.state() == Some(&ScheduleState::Enabled),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_as_scheduler_takes_it() {
        assert_eq!(expression(Micros(1_796_000_000_000_000)), "at(2026-11-30T00:53:20)");
    }

    #[test]
    fn the_target_is_of_the_roles_partition() {
        let arn = universal_target("arn:aws-cn:iam::123456789012:role/drums-schedule-0a1b2c3d");
        assert_eq!(arn, "arn:aws-cn:scheduler:::aws-sdk:ec2:terminateInstances");
    }
}
