//! QEMU's command line, as a pure function of what is wanted.
//!
//! One builder for cold, template and sibling, so that they differ only in what the mode needs: a template keeps its RAM
//! in a shared file, a sibling maps that file privately and reads the device state from a descriptor. Descriptors have
//! fixed numbers; whoever spawns QEMU puts them there.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Versioned on purpose: an alias means other hardware with another QEMU. Every QEMU since 7.2 has it.
pub const MACHINE: &str = "pc-q35-7.2";
/// The oldest QEMU with that machine.
pub const OLDEST: (u32, u32) = (7, 2);

/// Where QEMU finds its tap.
pub const TAP_FD: i32 = 3;
/// QMP's end of a connected socket pair: no path, no connect loop, nothing left behind.
pub const QMP_FD: i32 = 4;
/// A sibling's device state.
pub const STATE_FD: i32 = 5;

/// The same in every guest of every session, since it is part of the saved state: links are not shared, so it meets
/// nobody.
pub const GUEST_MAC: [u8; 6] = [0x06, 0x0d, 0x51, 0xe0, 0x00, 0x02];
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accel {
    Tcg,
    Kvm,
}

impl Accel {
    fn option(self) -> &'static str {
        match self {
            Self::Tcg => "tcg,thread=multi",
            Self::Kvm => "kvm",
        }
    }
    /// Everything that the accelerator can give: no arm is slowed by a poorer CPU.
    pub fn cpu(self) -> &'static str {
        match self {
            Self::Tcg => "max",
            Self::Kvm => "host",
        }
    }
}

/// Where the guest's memory lives and where its state comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Anonymous; boots.
    Private,
    /// A file that the guest writes through, to become the template's RAM; boots.
    Template { ram: PathBuf },
    /// The template's file, mapped copy on write; continues from the state behind [`STATE_FD`].
    Sibling { ram: PathBuf },
}

/// What a guest's kernel and its init are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    /// The workload's own kernel parameters.
    pub command_line: String,
    /// `drums.` parameters: key and value, without spaces.
    pub parameters: Vec<(String, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    pub name: String,
    pub accel: Accel,
    pub memory_bytes: u64,
    pub memory: Memory,
    pub boot: Boot,
    pub serial: PathBuf,
    /// `-L`, for a QEMU outside its usual place.
    pub data: Option<PathBuf>,
}

/// The devices and switches that must be the same when a saved state is loaded; part of a template's manifest.
pub fn hardware(accel: Accel) -> Vec<String> {
    let mac = GUEST_MAC.map(|b| format!("{b:02x}")).join(":");
    [
        // No disk controller, no PS/2 and no VMware port: nothing in the guest would use them, and a kernel that
        // probes them boots later.
        ("-machine", format!("{MACHINE},usb=off,vmport=off,sata=off,smbus=off,i8042=off,hpet=off")),
        ("-accel", accel.option().to_owned()),
        ("-cpu", accel.cpu().to_owned()),
        ("-smp", "1".to_owned()),
        ("-netdev", format!("tap,id=net0,fd={TAP_FD}")),
        // romfile is empty: nobody boots from the network.
        ("-device", format!("virtio-net-pci,netdev=net0,mac={mac},romfile=")),
        ("-object", "rng-random,id=rng0,filename=/dev/urandom".to_owned()),
        ("-device", "virtio-rng-pci,rng=rng0".to_owned()),
        // A fresh generation id in every process: a guest kernel that finds another one reseeds.
        ("-device", "vmgenid,guid=auto".to_owned()),
    ]
    .into_iter()
    .flat_map(|(k, v)| [k.to_owned(), v])
    .collect()
}

/// A comma ends a value in QEMU's option syntax; doubled it stands for itself.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

impl Machine {
    pub fn arguments(&self) -> Vec<String> {
        let mut a: Vec<String> = Vec::new();
        let mut push = |k: &str, v: String| {
            a.push(k.to_owned());
            a.push(v);
        };
        if let Some(data) = &self.data {
            push("-L", data.display().to_string());
        }
        push("-name", format!("guest={}", self.name));
        push("-display", "none".to_owned());
        push("-m", format!("{}k", self.memory_bytes / 1024));
        let (file, share) = match &self.memory {
            Memory::Private => (None, ""),
            Memory::Template { ram } => (Some(ram), "on"),
            Memory::Sibling { ram } => (Some(ram), "off"),
        };
        if let Some(ram) = file {
            let (path, size) = (escaped(ram), self.memory_bytes);
            push("-object", format!("memory-backend-file,id=ram0,size={size},mem-path={path},share={share}"));
            push("-machine", "memory-backend=ram0".to_owned());
        }
        push("-kernel", self.boot.kernel.display().to_string());
        push("-initrd", self.boot.initrd.display().to_string());
        push("-append", self.command_line());
        push("-chardev", format!("socket,id=qmp0,fd={QMP_FD}"));
        push("-mon", "chardev=qmp0,mode=control".to_owned());
        push("-chardev", format!("file,id=serial0,path={}", escaped(&self.serial)));
        push("-serial", "chardev:serial0".to_owned());
        if let Memory::Sibling { .. } = self.memory {
            // Deferred, because QEMU 7.2 takes x-ignore-shared from QMP only.
            push("-incoming", "defer".to_owned());
        }
        a.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned));
        a.extend(hardware(self.accel));
        a
    }

    fn command_line(&self) -> String {
        let mut line = self.boot.command_line.clone();
        for (k, v) in &self.boot.parameters {
            line.push_str(&format!(" drums.{k}={v}"));
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(memory: Memory) -> Machine {
        Machine {
            name: "drums-0badcafe-s7g1".to_owned(),
            accel: Accel::Tcg,
            memory_bytes: 512 << 20,
            memory,
            boot: Boot {
                kernel: "/t/vmlinux".into(),
                initrd: "/t/initrd.cpio".into(),
                command_line: "console=ttyS0 quiet".to_owned(),
                parameters: vec![("boot".to_owned(), "vm".to_owned())],
            },
            serial: "/s/a,b/serial.log".into(),
            data: None,
        }
    }

    fn value<'a>(args: &'a [String], key: &str, needle: &str) -> Option<&'a str> {
        args.windows(2).find(|w| w[0] == key && w[1].contains(needle)).map(|w| w[1].as_str())
    }

    #[test]
    fn cold_boots_from_private_memory() {
        let a = machine(Memory::Private).arguments();
        assert_eq!(value(&a, "-m", ""), Some("524288k"));
        assert_eq!(value(&a, "-object", "memory-backend"), None);
        assert_eq!(value(&a, "-incoming", ""), None);
        assert_eq!(value(&a, "-append", ""), Some("console=ttyS0 quiet drums.boot=vm"));
        assert!(value(&a, "-chardev", "path=/s/a,,b/serial.log").is_some());
    }

    #[test]
    fn a_sibling_never_shares_its_template_s_memory() {
        let a = machine(Memory::Sibling { ram: "/t/ram".into() }).arguments();
        assert!(value(&a, "-object", "share=off").is_some());
        assert_eq!(value(&a, "-object", "share=on"), None);
        assert_eq!(value(&a, "-incoming", ""), Some("defer"));
        let t = machine(Memory::Template { ram: "/t/ram".into() }).arguments();
        assert!(value(&t, "-object", "share=on").is_some());
        assert_eq!(value(&t, "-incoming", ""), None);
    }

    #[test]
    fn template_and_sibling_have_the_same_hardware() {
        let without = |m: Memory| {
            let mut a = machine(m).arguments();
            a.retain(|s| !s.contains("share=") && s != "-incoming" && s != "defer");
            a
        };
        assert_eq!(
            without(Memory::Template { ram: "/t/ram".into() }),
            without(Memory::Sibling { ram: "/t/ram".into() })
        );
    }

    #[test]
    fn the_machine_is_versioned() {
        let a = machine(Memory::Private).arguments();
        assert!(value(&a, "-machine", "pc-q35-7.2").is_some());
    }
}
