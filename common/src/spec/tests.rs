//! The files of `bad/` say in their first lines what must be found: `# expect LINE:COLUMN CODE FRAGMENT`.

use std::path::Path;

use super::*;
use crate::{
    clock::Micros,
    digest::Sha256,
    experiment::{BarRule, Control, Experiment, Registration},
};

const GOOD: &str = include_str!("good/two-arms.toml");
const EXP_028: &str = include_str!("../../../docs/experiments/EXP-028.toml");

fn known() -> Known {
    Known {
        now: Micros(1_796_000_000_000_000),
        hosts: ["h1", "h2"].map(|h| h.parse().unwrap()).into(),
        workloads: [("minimal".parse().unwrap(), vec![Sha256::of(b"tree")])].into(),
        ..Known::default()
    }
}

#[test]
fn bad_specs_are_refused_at_their_place() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/spec/bad");
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 25, "{} files", files.len());
    let mut wrong = Vec::new();
    for path in files {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).unwrap();
        let expected: Vec<&str> = text.lines().map_while(|l| l.strip_prefix("# expect ")).collect();
        assert!(!expected.is_empty(), "{name} says nothing of what it expects");
        let bad = match parse(&name, text.as_bytes()) {
            Err(bad) => bad,
            Ok(_) => {
                wrong.push(format!("{name}: accepted"));
                continue;
            }
        };
        for line in &expected {
            let mut parts = line.splitn(3, ' ');
            let (place, code, fragment) = (parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap_or(""));
            let met = bad.faults.iter().any(|f| {
                format!("{}:{}", f.line, f.column) == place
                    && f.code == code
                    && format!("{} {}", f.message, f.help).contains(fragment)
            });
            if !met {
                wrong.push(format!("{name}: wanted {line:?}, got\n{bad}"));
            }
        }
        if bad.faults.len() != expected.len() {
            wrong.push(format!("{name}: {} faults expected, got\n{bad}", expected.len()));
        }
        if bad.faults.iter().any(|f| f.help.is_empty()) {
            wrong.push(format!("{name}: a fault without help\n{bad}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_good_spec_is_accepted_and_controls_take_their_arms_kind() {
    let parsed = parse("good", GOOD.as_bytes()).unwrap_or_else(|e| panic!("{e}"));
    parsed.check(&known()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(parsed.experiment.arms[2].kind, parsed.experiment.arms[0].kind);
    assert_eq!(parsed.experiment.bars[0].rule, BarRule::Bound);
}

#[test]
fn the_first_comparison_is_as_fixed() {
    let e = parse("EXP-028.toml", EXP_028.as_bytes()).unwrap_or_else(|e| panic!("{e}")).experiment;
    let names: Vec<_> = e.arms.iter().map(|a| a.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "drums-cold",
            "drums-restored",
            "runc-cold",
            "runc-restored",
            "qemu-cold",
            "qemu-warm",
            "drums-restored-b",
            "drums-cold-delayed"
        ]
    );
    assert!(matches!(&e.arms[6].control, Some(Control::SameAs { arm }) if arm.as_str() == "drums-restored"));
    assert!(
        matches!(&e.arms[7].control, Some(Control::Delayed { arm, fraction }) if arm.as_str() == "drums-cold" && *fraction == 0.25)
    );
    assert_eq!((e.design.blocks_per_host, e.design.template_builds_per_host, e.hosts.count), (8, 4, 2));
    assert_eq!((e.limits.cpu_milli, e.limits.memory_bytes), (1000, 512 << 20));
    let bars: Vec<_> = e.bars.iter().map(|b| (b.numerator.as_str(), b.denominator.as_str(), b.at_most)).collect();
    assert_eq!(
        bars,
        [("qemu-warm", "qemu-cold", 0.25), ("drums-cold", "runc-cold", 0.6), ("drums-restored", "runc-restored", 0.8)]
    );
    assert!(e.bars.iter().all(|b| b.rule == BarRule::Bound));
}

#[test]
fn ids_1_to_27_are_reserved() {
    let mut ids: Vec<_> = reserved().into_iter().map(|r| r.id.0).collect();
    ids.sort_unstable();
    assert_eq!(ids, (1..=27).collect::<Vec<_>>());
}

fn refused(text: &str, known: &Known) -> Fault {
    let parsed = parse("x.toml", text.as_bytes()).unwrap_or_else(|e| panic!("{e}"));
    let mut bad = parsed.check(known).expect_err("must be refused");
    assert_eq!(bad.faults.len(), 1, "{bad}");
    bad.faults.remove(0)
}

#[test]
fn a_reserved_id_is_taken() {
    let fault = refused(&GOOD.replace("EXP-100", "EXP-004"), &known());
    assert_eq!((fault.code.as_str(), fault.line, fault.column), ("taken-id", 1, 6));
    assert!(fault.help.contains("EXP-028"), "{fault}");
}

#[test]
fn a_registered_id_with_other_content_is_taken_unless_it_is_an_amendment() {
    let mut known = known();
    known.registered.insert("EXP-100".parse().unwrap(), Sha256::of(b"other"));
    let fault = refused(GOOD, &known);
    assert_eq!((fault.code.as_str(), fault.line), ("taken-id", 1));
    known.amend = true;
    parse("x", GOOD.as_bytes()).unwrap().check(&known).unwrap();
}

#[test]
fn the_same_spec_may_be_registered_again() {
    let mut known = known();
    let parsed = parse("x", GOOD.as_bytes()).unwrap();
    let sha = Registration::freeze(parsed.pinned(&known), known.now).unwrap().sha256;
    known.registered.insert("EXP-100".parse().unwrap(), sha);
    parsed.check(&known).unwrap();
}

#[test]
fn absent_hosts_and_workloads_wrong_digests_and_past_deadlines_are_refused() {
    let fault = refused(&GOOD.replace("\"h2\"", "\"h3\""), &known());
    assert_eq!((fault.code.as_str(), fault.line, fault.column), ("absent-host", 30, 16));
    let fault = refused(&GOOD.replace("\"minimal\"", "\"desktop\""), &known());
    assert_eq!((fault.code.as_str(), fault.line), ("absent-workload", 6));
    let digest = Sha256::of(b"another tree");
    let fault = refused(&GOOD.replace("\"minimal\"", &format!("\"minimal\"\nsha256 = \"{digest}\"")), &known());
    assert_eq!((fault.code.as_str(), fault.line, fault.column), ("wrong-digest", 7, 10));
    let fault = refused(
        &GOOD.replace("deadline_minutes = 30", "deadline_minutes = 30\nnot_after = 2020-01-01T00:00:00Z"),
        &known(),
    );
    assert_eq!((fault.code.as_str(), fault.line), ("deadline-past", 27));
}

#[test]
fn what_is_no_text_is_refused_before_it_is_read() {
    let big = vec![b'#'; 10 << 20];
    assert_eq!(parse("big", &big).unwrap_err().faults[0].code, "too-large");
    let bad = parse("latin1", b"id = \"EXP-100\"\ntitle = \"Caf\xe9\"\n").unwrap_err();
    assert_eq!((bad.faults[0].code.as_str(), bad.faults[0].line, bad.faults[0].column), ("not-utf8", 2, 13));
    assert_eq!(parse("empty", b"\n  \n").unwrap_err().faults[0].code, "empty");
    assert_eq!(parse("zeros", &[0; 100]).unwrap_err().faults[0].code, "not-toml");
    let deep = "a = ".to_owned() + &"[".repeat(100_000);
    assert_eq!(parse("deep", deep.as_bytes()).unwrap_err().faults[0].code, "not-toml");
}

#[test]
fn freezing_gives_the_same_digest_whatever_the_layout_of_the_file() {
    let parsed = parse("a", GOOD.as_bytes()).unwrap().experiment;
    let other = GOOD.replace("seed = 1", "# a remark\nseed   =   0x1");
    let other = parse("b", other.as_bytes()).unwrap().experiment;
    let freeze = |e| Registration::freeze(e, Micros(0)).unwrap().sha256;
    assert_eq!(freeze(parsed), freeze(other));
}

proptest::proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400)) {
        let _ = parse("x", &bytes);
    }

    #[test]
    fn no_edit_of_the_good_spec_makes_it_panic(at in 0usize..1000, insert in "[\\[\\]={}\"'a-z0-9.\n#-]{0,6}", cut in 0usize..20) {
        let at = at.min(GOOD.len());
        let end = (at + cut).min(GOOD.len());
        let text = format!("{}{insert}{}", &GOOD[..at], &GOOD[end..]);
        if let Err(bad) = parse("x", text.as_bytes()) {
            proptest::prop_assert!(!bad.faults.is_empty());
        }
    }
}

#[test]
fn thousands_of_faults_are_counted_not_listed() {
    let keys: String = (0..20_000).map(|i| format!("k{i} = 1\n")).collect();
    let bad = parse("many", keys.as_bytes()).unwrap_err();
    assert_eq!(bad.faults.len(), MAX_FAULTS);
    assert!(bad.faults.len() + bad.more > 20_000, "{}", bad.more);
    assert!(bad.to_string().ends_with(&format!("and {} more", bad.more)));
    let long = format!("{} = 1\n", "k".repeat(200_000));
    assert!(parse("long", long.as_bytes()).unwrap_err().faults.iter().all(|f| f.message.chars().count() < 500));
}

/// The reader's rules and those for a registration from outside are the same.
#[test]
fn what_a_spec_may_not_say_a_registration_may_not_either() {
    let good = parse("good", GOOD.as_bytes()).unwrap().experiment;
    assert_eq!(good.check(), Ok(()));
    let thaw = |e: &Experiment| {
        let frozen = Registration::freeze(e.clone(), Micros(0)).unwrap();
        Registration::thaw(&frozen.canonical, frozen.sha256, Micros(0))
    };
    assert!(thaw(&good).is_ok());
    let changes: [fn(&mut Experiment); 12] = [
        |e| e.design.alpha = 2.5,
        |e| e.design.margin = 0.0,
        |e| e.design.max_runs = 0,
        |e| e.design.blocks_per_host += 1,
        |e| e.limits.cpuset_size = u32::MAX,
        |e| e.deadline_ms = 0,
        |e| e.arms.truncate(1),
        |e| e.arms[1].name = e.arms[0].name.clone(),
        |e| e.metrics.clear(),
        |e| e.bars[0].numerator = e.bars[0].denominator.clone(),
        |e| e.gates.max_canary_ratio = -1.0,
        |e| e.version += 1,
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let mut e = good.clone();
        change(&mut e);
        assert!(thaw(&e).is_err(), "change {i}");
    }
}

/// `## TABLE` of the reference with its rows: field and what its value may be.
fn reference() -> Vec<(&'static str, Vec<(&'static str, &'static str)>)> {
    const REFERENCE: &str = include_str!("../../../docs/spec.md");
    let sections = REFERENCE.split("\n## ").skip(1);
    sections
        .map(|section| {
            let (table, rest) = section.split_once('\n').unwrap();
            let rows = rest.lines().filter_map(|line| {
                let mut cells = line.strip_prefix("| `")?.splitn(3, " | ");
                Some((cells.next()?.strip_suffix('`')?, cells.next()?))
            });
            (table, rows.collect())
        })
        .collect()
}

#[test]
fn the_reference_lists_every_field_of_every_table() {
    const UNKNOWN: &str = "zzz = 1\n";
    let mut tables = 0;
    for (table, rows) in reference() {
        let spec = match table {
            "the spec" => format!("{UNKNOWN}{EXP_028}"),
            "gates" => EXP_028.replace("[gates]\n", &format!("[gates]\n{UNKNOWN}")),
            "[[arm]] control" => EXP_028.replace("{ delayed", "{ zzz = 1, delayed"),
            _ => EXP_028.replacen(&format!("\n{table}\n"), &format!("\n{table}\n{UNKNOWN}"), 1),
        };
        let bad = parse("x", spec.as_bytes()).unwrap_err();
        let fault = bad.faults.iter().find(|f| f.code == "unknown-field").unwrap_or_else(|| panic!("{table}: {bad}"));
        let (_, known) = fault.help.split_once(" has ").unwrap();
        let known: Vec<_> = known.split(", ").collect();
        let listed: Vec<_> = rows.iter().map(|(field, _)| *field).collect();
        assert_eq!(listed, known, "{table}");
        tables += 1;
    }
    assert_eq!(tables, 11);
}

#[test]
fn the_reference_says_the_ranges_and_defaults_that_are_kept() {
    let (mut ranges, mut defaults) = (0, 0);
    let gates_left_out = EXP_028.split("[gates]").next().unwrap();
    let left_out = serde_json::to_value(parse("x", gates_left_out.as_bytes()).unwrap().experiment.gates).unwrap();
    for (table, rows) in reference() {
        for (field, value) in rows {
            let (range, default) = value.split_once("; optional: ").map_or((value, None), |(r, d)| (r, Some(d)));
            if !range.starts_with("a whole number ") && !range.starts_with("a number ") {
                continue;
            }
            let (before, after) = EXP_028.split_once(&format!("{field} = ")).unwrap_or_else(|| panic!("{field}"));
            let rest = &after[after.find(['\n', ' ']).unwrap()..];
            let bad = parse("x", format!("{before}{field} = -1{rest}").as_bytes()).unwrap_err();
            let fault =
                bad.faults.iter().find(|f| f.code == "out-of-range").unwrap_or_else(|| panic!("{field}: {bad}"));
            assert_eq!(fault.help, format!("expected {range}"), "{table} {field}");
            ranges += 1;
            if let Some(default) = default {
                assert_eq!(left_out[field].as_f64(), Some(default.parse().unwrap()), "{field}");
                defaults += 1;
            }
        }
    }
    assert_eq!((ranges, defaults), (22, 6));
}
