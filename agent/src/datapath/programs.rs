//! The loaded programs.

use std::{
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

use aya::{
    Ebpf, EbpfLoader,
    programs::{Program, ProgramError, SchedClassifier, Xdp},
};
use portcullis_common::layout::{maps, programs};

use super::{error::DataPathError, maps::pin_path};

/// Which copy of a program. A TCX hook takes a program only once, so moving ours before a stranger's without a gap needs
/// a second copy: that is attached first, and only then the old one let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copy {
    Main,
    Spare,
}

impl Copy {
    pub(super) const fn other(self) -> Self {
        match self {
            Self::Main => Self::Spare,
            Self::Spare => Self::Main,
        }
    }
}

/// All programs of the object; the spare copy only of the classifiers, and only once it is needed.
#[derive(Debug)]
pub(super) struct Programs {
    object: &'static [u8],
    maps: PathBuf,
    main: Ebpf,
    spare: Option<Ebpf>,
    frags: bool,
}

const CLASSIFIERS: [&str; 4] = [programs::TC_IN, programs::TC_OUT, programs::TC_L3_IN, programs::TC_L3_OUT];

impl Programs {
    /// Opens the object: maps that are pinned in `folder` are used, the others made and pinned there.
    pub(super) fn open(object: &'static [u8], folder: &Path) -> Result<Self, DataPathError> {
        #[cfg_attr(not(feature = "kernel-log"), expect(unused_mut, reason = "only the logger takes it"))]
        let mut main = open(object, folder)?;
        #[cfg(feature = "kernel-log")]
        listen(&mut main);
        Ok(Self { object, maps: folder.to_owned(), main, spare: None, frags: false })
    }

    pub(super) fn object(&mut self) -> &mut Ebpf {
        &mut self.main
    }

    /// Has the kernel verify every program. Only XDP with fragments may be refused: kernels before 5.18 do.
    pub(super) fn load(&mut self) -> Result<(), DataPathError> {
        for name in programs::ALL {
            match load(&mut self.main, name) {
                Ok(()) if name == programs::XDP_FRAGS => self.frags = true,
                Err(error) if name == programs::XDP_FRAGS => {
                    tracing::info!(error = &error as &dyn std::error::Error, "XDP without multi-buffer support");
                }
                other => other?,
            }
        }
        Ok(())
    }

    /// XDP programs in the order in which they are to be tried.
    pub(super) fn xdp_names(&self) -> &'static [&'static str] {
        if self.frags { &[programs::XDP_FRAGS, programs::XDP] } else { &[programs::XDP] }
    }

    /// A program's descriptor. Asking for the spare copy loads it.
    pub(super) fn fd(&mut self, copy: Copy, name: &'static str) -> Result<BorrowedFd<'_>, DataPathError> {
        let object = match copy {
            Copy::Main => &self.main,
            Copy::Spare => match &mut self.spare {
                Some(spare) => spare,
                slot @ None => {
                    let mut spare = open(self.object, &self.maps)?;
                    for classifier in CLASSIFIERS {
                        load(&mut spare, classifier)?;
                    }
                    slot.insert(spare)
                }
            },
        };
        let program = object.program(name).ok_or(DataPathError::ObjectPart { name })?;
        Ok(program.fd().map_err(|source| DataPathError::Program { name, source: Box::new(source) })?.as_fd())
    }

    /// The kernel's number of a program's main copy.
    pub(super) fn id(&self, name: &'static str) -> Result<u32, DataPathError> {
        let program = self.main.program(name).ok_or(DataPathError::ObjectPart { name })?;
        let info = program.info().map_err(|source| DataPathError::Program { name, source: Box::new(source) })?;
        Ok(info.id())
    }

    pub(super) fn classifier(&self, name: &'static str) -> Result<&SchedClassifier, DataPathError> {
        self.main.program(name).and_then(|program| program.try_into().ok()).ok_or(DataPathError::ObjectPart { name })
    }

    pub(super) fn xdp(&self) -> Result<&Xdp, DataPathError> {
        let name = self.xdp_names()[0];
        self.main.program(name).and_then(|program| program.try_into().ok()).ok_or(DataPathError::ObjectPart { name })
    }
}

/// Passes on what the programs tell; only the main copy's, since the spare one has a buffer of its own.
#[cfg(feature = "kernel-log")]
fn listen(object: &mut Ebpf) {
    const PAUSE: std::time::Duration = std::time::Duration::from_millis(100);
    let mut logger = match aya_log::EbpfLogger::init(object) {
        Ok(logger) => logger,
        Err(error) => return tracing::warn!(%error, "the kernel programs' log cannot be read"),
    };
    std::thread::spawn(move || {
        loop {
            logger.flush();
            std::thread::sleep(PAUSE);
        }
    });
}

fn open(object: &[u8], folder: &Path) -> Result<Ebpf, DataPathError> {
    let mut loader = EbpfLoader::new();
    for name in maps::ALL {
        loader.map_pin_path(name, pin_path(folder, name));
    }
    loader.load(object).map_err(|source| DataPathError::Object(Box::new(source)))
}

fn load(object: &mut Ebpf, name: &'static str) -> Result<(), DataPathError> {
    let program = object.program_mut(name).ok_or(DataPathError::ObjectPart { name })?;
    let loaded: Result<(), ProgramError> = match program {
        Program::Xdp(program) => program.load(),
        Program::SchedClassifier(program) => program.load(),
        Program::CgroupSkb(program) => program.load(),
        Program::SockOps(program) => program.load(),
        _ => return Err(DataPathError::ObjectPart { name }),
    };
    loaded.map_err(|source| DataPathError::Program { name, source: Box::new(source) })
}
