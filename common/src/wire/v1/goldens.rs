//! Golden bytes of every message of version 1: what was once on the wire stays readable, byte for byte. Refresh with
//! `UPDATE_EXPECT=1` only while the version is unreleased.

use std::{collections::BTreeMap, fmt::Debug};

use proptest::prelude::*;
use serde::{Serialize, de::DeserializeOwned};

use super::*;
use crate::{
    arm::ArmKind,
    clock::Micros,
    evidence::*,
    experiment::Metric,
    failure::FailureClass,
    ids::SessionRef,
    machine::{Accelerator, MachineIdentity, Tool},
    wire::{
        codec::{CodecError, decode, encode},
        frame::Lane,
        golden,
    },
};

fn sha(text: &str) -> Sha256 {
    Sha256::of(text.as_bytes())
}
fn arm() -> ArmName {
    "drums-cold".parse().unwrap()
}
fn run() -> RunId {
    RunId([1, 2, 3, 4, 5, 6])
}
fn session() -> SessionRef {
    SessionRef { number: 7, generation: Generation(2) }
}
fn failure() -> Failure {
    Failure::new(FailureClass::Transient, "disk-full", "cannot store: disk full", "free some space")
}

fn facts() -> HostFacts {
    HostFacts {
        identity: MachineIdentity {
            boot_id: "boot".into(),
            machine_id: "machine".into(),
            dmi_uuid: String::new(),
            btime_s: 1_700_000_000,
            hardware: "cpu x2".into(),
        },
        hostname: "bench".into(),
        kernel: "6.18.0".into(),
        os: "Debian 12".into(),
        cpu_model: "cpu".into(),
        microcode: "0x1".into(),
        mitigations: BTreeMap::from([("meltdown".into(), "not affected".into())]),
        cpus: 2,
        memory_bytes: 1 << 34,
        disk_free_bytes: 1 << 35,
        cgroup_version: 1,
        accelerator: Accelerator::Tcg,
        accelerator_detail: "no /dev/kvm".into(),
        tools: BTreeMap::from([(
            "criu".into(),
            Tool { path: "/criu".into(), version: "4.1".into(), sha256: sha("criu") },
        )]),
        unfit: BTreeMap::from([(ArmKind::QemuWarm, "no qemu".into())]),
    }
}

fn bodies() -> Vec<Body> {
    let identity = Identity {
        hostname: "s7".into(),
        machine_id: "0a".into(),
        address: "198.19.0.2/30".into(),
        random: "ff".into(),
    };
    let phase = Phase { name: "clone".into(), start_us: 1, end_us: 2 };
    vec![
        Body::Preflight(Preflight {
            facts: facts(),
            agent_version: "0.1.0".into(),
            agent_sha256: sha("agent"),
            workload_sha256: sha("tree"),
            clock_resolution_ns: BTreeMap::from([("CLOCK_MONOTONIC_RAW".into(), 1)]),
            note: String::new(),
        }),
        Body::Template(Template {
            arm: arm(),
            build: 1,
            duration_ms: 12.5,
            bytes: 1024,
            sha256: sha("image"),
            state: "saved".into(),
            identity: identity.clone(),
        }),
        Body::BlockStarted(BlockStarted {
            block: 3,
            kind: BlockKind::Measured,
            order: vec![arm()],
            template_build: 1,
            cpus: vec![1],
            environment_bytes: 512,
            delays_ms: BTreeMap::from([(arm(), 1.5)]),
        }),
        Body::Sample(Sample {
            block: 3,
            kind: BlockKind::WarmUp,
            position: 2,
            arm: arm(),
            session: session(),
            template_build: 1,
            metric: Metric::CreateToReady,
            value: 12.25,
            unit: "ms".into(),
            clock: "CLOCK_MONOTONIC_RAW".into(),
            intended_start_us: 9,
        }),
        Body::Timeline(Timeline {
            block: 3,
            position: 2,
            arm: arm(),
            session: session(),
            operation: "create".into(),
            phases: vec![phase],
        }),
        Body::Fidelity(Fidelity {
            block: 3,
            position: 2,
            arm: arm(),
            kind: ArmKind::DrumsCold,
            session: session(),
            mechanism: BTreeMap::from([("pid".into(), "new".into())]),
            limits: LimitsRead { cpu_milli: 1000, cpus: vec![1], memory_bytes: 1 << 29 },
            workload_sha256: sha("tree"),
            guest_sha256: sha("guest"),
            faults: vec!["none really".into()],
        }),
        Body::Outcome(Outcome {
            block: 3,
            kind: BlockKind::Measured,
            position: 2,
            arm: arm(),
            session: session(),
            valid: false,
            failures: vec!["not ready".into()],
            failed_metrics: vec![Metric::ResetToReady],
            identity: identity.clone(),
            state: String::new(),
            identity_after_reset: identity,
        }),
        Body::BlockEnded(BlockEnded {
            block: 3,
            kind: BlockKind::Measured,
            result: BlockResult::Interrupted("SIGTERM".into()),
            environment: Environment::default(),
        }),
        Body::Log(Log { level: "warn".into(), target: "criu".into(), text: "odd".into() }),
        Body::Closed(Closed { teardown: Teardown::Leaked(vec!["cgroup x".into()]), reason: "cancelled".into() }),
    ]
}

fn records() -> Vec<Record> {
    bodies()
        .into_iter()
        .enumerate()
        .map(|(i, body)| Record {
            registration: sha("registration"),
            run: run(),
            host: "h1".parse().unwrap(),
            seq: i as u64 + 1,
            at: Micros(1_700_000_000_000_000 + i as i64),
            generation: Generation(2),
            body,
        })
        .collect()
}

fn check<T: Serialize + DeserializeOwned + PartialEq + Debug>(name: &str, lane: Lane, value: &T) {
    golden::check("v1", name, lane, value);
}

#[test]
fn messages_keep_their_bytes() {
    let host: HostId = "h1".parse().unwrap();
    let welcome = Welcome {
        host: host.clone(),
        generation: Generation(2),
        beat_ms: 1_000,
        dispatch_lease_ms: 10_000,
        life_lease_ms: 1_800_000,
    };
    let hello = AgentHello {
        agent_version: "0.1.0".into(),
        agent_sha256: sha("agent"),
        installation: InstallationId([1, 2, 3, 4]),
        instance: 0x0102_0304_0506_0708,
        facts: facts(),
        spools: vec![SpoolState { run: run(), last_seq: 9, closed: true }],
    };
    let desired = |phase| {
        let grant =
            Grant { block: 3, kind: BlockKind::Measured, order: vec![arm()], template_build: 1, seed: u64::MAX };
        ToAgent::Desired(Desired {
            generation: Generation(2),
            runs: vec![RunDesired {
                run: run(),
                registration: sha("registration"),
                canonical: "{}".into(),
                workload_sha256: sha("tree"),
                phase,
                granted: vec![grant],
                acked_seq: 4,
                deadline_left_ms: 60_000,
            }],
        })
    };
    use Lane::{Artifact, Control, Datagram, Enrol, Evidence};
    check("to-agent-welcome", Control, &ToAgent::Welcome(welcome));
    check("to-agent-refused", Control, &ToAgent::Refused(failure()));
    check("to-agent-desired-prepare", Control, &desired(RunPhase::Prepare));
    check("to-agent-desired-measure", Control, &desired(RunPhase::Measure));
    check("to-agent-desired-unwind", Control, &desired(RunPhase::Unwind));
    check("to-agent-desired-cancel", Control, &desired(RunPhase::Cancel));
    check("to-agent-retire", Control, &ToAgent::Retire { reason: "released".into() });
    check("to-agent-goodbye", Control, &ToAgent::Goodbye);
    let segments = vec![UploadUrl("https://bucket/h1/00000.segment?signature".into())];
    let uploads = Uploads { runs: vec![RunUploads { run: run(), segments, valid_ms: 9_000_000 }] };
    check("to-agent-uploads", Control, &ToAgent::Uploads(uploads));
    let renewed = EnrolReply::Enrolled { certificate_pem: "cert".into(), ca_pem: "ca".into() };
    check("to-agent-renewal", Control, &ToAgent::Renewal(renewed));
    check("to-agent-renewal-refused", Control, &ToAgent::Renewal(EnrolReply::Refused(failure())));
    let upgrade = Upgrade { sha256: sha("agent"), bytes: 1_000, ordered: Micros(1_700_000_000_000_000) };
    check("to-agent-upgrade", Control, &ToAgent::Upgrade(upgrade.clone()));
    let failed = ToCoordinator::UpgradeFailed { upgrade, failure: failure() };
    check("to-coordinator-upgrade-failed", Control, &failed);
    check("to-coordinator-renew", Control, &ToCoordinator::Renew { csr_der: vec![1, 2, 3] });
    check("to-coordinator-hello", Control, &ToCoordinator::Hello(Box::new(hello)));
    check("to-coordinator-facts", Control, &ToCoordinator::Facts(Box::new(facts())));
    check("to-coordinator-refused", Control, &ToCoordinator::Refused { run: run(), failure: failure() });
    check("to-coordinator-goodbye", Control, &ToCoordinator::Goodbye { reason: "SIGTERM".into() });
    check("evidence-batch", Evidence, &EvidenceBatch { run: run(), records: records() });
    check("evidence-ack", Evidence, &EvidenceAck { run: run(), through_seq: 10 });
    check("artifact-request", Artifact, &ArtifactRequest { sha256: sha("artifact"), offset: 17 });
    check("artifact-head-found", Artifact, &ArtifactHead::Found { total_bytes: 99 });
    check("artifact-head-missing", Artifact, &ArtifactHead::Missing(failure()));
    for (name, activity) in [
        ("idle", Activity::Idle),
        ("preparing", Activity::Preparing { run: run() }),
        ("building", Activity::Building { run: run(), arm: arm() }),
        ("measuring", Activity::Measuring { run: run(), block: 3, arm: arm() }),
        ("unwinding", Activity::Unwinding { run: run() }),
    ] {
        let beat = Beat {
            generation: Generation(2),
            number: 5,
            sent: MonoMicros(12_345_678),
            activity,
            quiet_ms: 30_000,
            progress: 8,
        };
        check(&format!("beat-{name}"), Datagram, &beat);
    }
    check("beat-ack", Datagram, &BeatAck { generation: Generation(2), number: 5, sent: MonoMicros(12_345_678) });
    let enrol =
        EnrolRequest { secret: vec![7; 32], host, csr_der: vec![0x30, 0], installation: InstallationId([1, 2, 3, 4]) };
    check("enrol-request", Enrol, &enrol);
    check("enrol-reply-enrolled", Enrol, &EnrolReply::Enrolled { certificate_pem: "cert".into(), ca_pem: "ca".into() });
    check("enrol-reply-refused", Enrol, &EnrolReply::Refused(failure()));
}

proptest! {
    /// Random bytes, and good messages with bytes flipped, decode or fail; they never panic or allocate beyond the cap.
    #[test]
    fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        let _ = decode::<ToAgent>(Lane::Control, &bytes);
        let _ = decode::<ToCoordinator>(Lane::Control, &bytes);
        let _ = decode::<EvidenceBatch>(Lane::Evidence, &bytes);
        let _ = decode::<EvidenceAck>(Lane::Evidence, &bytes);
        let _ = decode::<ArtifactRequest>(Lane::Artifact, &bytes);
        let _ = decode::<ArtifactHead>(Lane::Artifact, &bytes);
        let _ = decode::<Beat>(Lane::Datagram, &bytes);
        let _ = decode::<BeatAck>(Lane::Datagram, &bytes);
        let _ = decode::<EnrolRequest>(Lane::Enrol, &bytes);
        let _ = decode::<EnrolReply>(Lane::Enrol, &bytes);
    }

    #[test]
    fn damaged_messages_never_panic(at in 0usize..3000, with in any::<u8>()) {
        let mut bytes = encode(Lane::Evidence, &EvidenceBatch { run: run(), records: records() }).unwrap();
        let i = at % bytes.len();
        bytes[i] ^= with;
        let _ = decode::<EvidenceBatch>(Lane::Evidence, &bytes);
    }
}

#[test]
fn a_signature_is_never_printed() {
    let url = UploadUrl("https://bucket/h1/00000.segment?X-Amz-Signature=abcdef".into());
    let run = RunUploads { run: run(), segments: vec![url], valid_ms: 1 };
    let shown = format!("{:?}", ToAgent::Uploads(Uploads { runs: vec![run] }));
    assert!(shown.contains("bucket/h1/00000.segment") && !shown.contains("abcdef"), "{shown}");
}

/// A length that claims more than there is must fail by its claim: nothing is allocated for it.
#[test]
fn hostile_lengths_are_refused() {
    // bincode's varint for a u64: 253 and eight bytes.
    let mut bytes = vec![253];
    bytes.extend(u64::MAX.to_le_bytes());
    assert!(decode::<Vec<u8>>(Lane::Control, &bytes).is_err());
    assert!(decode::<String>(Lane::Control, &bytes).is_err());
    assert!(decode::<Vec<Record>>(Lane::Evidence, &bytes).is_err());
    assert!(matches!(
        decode::<Vec<u8>>(Lane::Artifact, &vec![0; Lane::Artifact.cap() + 1]),
        Err(CodecError::TooLong { .. })
    ));
}
