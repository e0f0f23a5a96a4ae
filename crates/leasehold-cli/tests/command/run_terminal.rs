//! `leasehold run` in a terminal behaves like the command without it. Tested with an interactive bash in a pseudo-terminal.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::run_support::{Job, World, is_alive, wait_for};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

const PROMPT: &str = "ready> ";
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// A terminal with a shell.
struct Terminal {
    keyboard: File,
    screen: Receiver<Vec<u8>>,
    seen: String,
    shell: Option<Job>,
}

impl Terminal {
    fn open(world: &World) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a terminal");
        grantpt(&master).expect("ours");
        unlockpt(&master).expect("ours");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let side = || -> OwnedFd {
            rustix::fs::open(&name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())
                .expect("its other side")
        };
        let size = rustix::termios::Winsize { ws_row: 24, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&master, size).expect("a size");
        let mut shell = Command::new("setsid");
        shell.args(["--ctty", "bash", "--norc", "--noprofile", "-i"]);
        shell.stdin(Stdio::from(side())).stdout(Stdio::from(side())).stderr(Stdio::from(side()));
        shell.current_dir(world.dir.path()).env("LEASEHOLD_STORE", &world.url).env("PS1", PROMPT).env("TERM", "xterm");
        shell.env("L", env!("CARGO_BIN_EXE_leasehold")).env("HISTFILE", "");
        let keyboard = File::from(master);
        let mut reader = keyboard.try_clone().expect("a second handle");
        let (tell, screen) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Reading a terminal that no process has open any more is an error.
            while let Ok(n @ 1..) = reader.read(&mut bytes) {
                if tell.send(bytes[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        let shell = Some(Job::start(&mut shell));
        let mut terminal = Self { keyboard, screen, seen: String::new(), shell };
        terminal.expect(PROMPT);
        // Without echo the screen shows program output only.
        terminal.line("stty -echo");
        terminal.expect(PROMPT);
        terminal
    }

    fn keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("somebody reads");
    }

    fn line(&mut self, line: &str) {
        self.keys(&format!("{line}\n"));
    }

    /// Waits for a text on the screen. Returns the text before it, and discards both.
    fn expect(&mut self, text: &str) -> String {
        let began = Instant::now();
        loop {
            if let Some(at) = self.seen.find(text) {
                let rest = self.seen.split_off(at + text.len());
                let mut before = std::mem::replace(&mut self.seen, rest);
                before.truncate(at);
                return before;
            }
            let left = WAIT_TIMEOUT.saturating_sub(began.elapsed());
            match self.screen.recv_timeout(left) {
                Ok(bytes) => self.seen += &String::from_utf8_lossy(&bytes),
                Err(_) => panic!("timed out waiting for {text:?}; on the screen: {:?}", self.seen),
            }
        }
    }

    /// Runs a line and returns its exit code.
    fn code_of(&mut self, line: &str) -> String {
        self.line(&format!("{line}; echo \"code=$?=\""));
        self.code()
    }

    fn code(&mut self) -> String {
        let before = self.expect("code=");
        let code = self.expect("=");
        self.expect(PROMPT);
        // Only shown if the test fails.
        println!("{before:?} code {code}");
        code
    }
}

#[test]
fn ctrl_c_ends_the_job_and_the_script_around_it() {
    let world = World::sqlite();
    let mut terminal = Terminal::open(&world);
    terminal.line("$L run a -- sleep 60");
    wait_for("the lock", || world.is_held("a").then_some(()));
    terminal.keys("\x03");
    println!("{:?}", terminal.expect(PROMPT));
    assert_eq!(terminal.code_of("(exit $?)"), "130");
    assert!(!world.is_held("a"));
    // A shell ends a loop only if the job was ended by the signal.
    terminal.line("for i in 1 2 3; do echo >> rounds; $L run a -- sleep 60; done");
    world.lines("rounds", 1);
    wait_for("the lock", || world.is_held("a").then_some(()));
    terminal.keys("\x03");
    terminal.expect(PROMPT);
    assert_eq!(terminal.code_of("true"), "0");
    assert_eq!(world.lines("rounds", 1).len(), 1, "the loop went on");
    // A command that handles the signal continues, and receives it once.
    let script = "trap \"echo >> ints\" INT; until grep -q SigBlk:.00000000[1-9a-f] /proc/$PPID/status; do :; done; \
                  echo >> in; while [ ! -e end ]; do sleep 0.05; done; exit 9";
    terminal.line(&format!("$L run a -- sh -c '{script}'; echo \"code=$?=\""));
    world.lines("in", 1);
    terminal.keys("\x03");
    world.lines("ints", 1);
    std::fs::write(world.path("end"), "").expect("a file");
    assert_eq!(terminal.code(), "9");
    assert_eq!(world.lines("ints", 1).len(), 1, "sent more than once");
}

#[test]
fn ctrl_z_and_fg_work() {
    let world = World::sqlite();
    let mut terminal = Terminal::open(&world);
    terminal.line("$L run --ttl 1s a -- cat");
    wait_for("the lock", || world.is_held("a").then_some(()));
    terminal.line("before");
    terminal.expect("before");
    for _ in 0..3 {
        terminal.keys("\x1a");
        terminal.expect("Stopped");
        terminal.expect(PROMPT);
        // Longer than its lease: a suspended job keeps its lock.
        std::thread::sleep(Duration::from_millis(1_300));
        assert_eq!(terminal.code_of("$L run --no-wait a -- true 2>/dev/null"), "75");
        terminal.line("fg");
        terminal.line("after");
        terminal.expect("after");
    }
    terminal.keys("\x04");
    // The prompt may be an old one, so ask the shell for output.
    assert_eq!(terminal.code_of("(exit $?)"), "0");
    assert!(!world.is_held("a"));
}

#[test]
fn a_full_screen_editor_works() {
    let world = World::sqlite();
    let mut terminal = Terminal::open(&world);
    terminal.line("$L run a -- vi -u NONE -N text; echo \"code=$?=\"");
    // The alternate screen.
    terminal.expect("\x1b[?1049h");
    terminal.keys("ihello");
    terminal.expect("hello");
    terminal.keys("\x1b");
    terminal.keys("\x1a");
    terminal.expect("Stopped");
    terminal.expect(PROMPT);
    terminal.line("fg");
    terminal.expect("\x1b[?1049h");
    terminal.keys("o");
    terminal.keys("world\x1b:wq\r");
    terminal.expect("\x1b[?1049l");
    // `fg` is a command of its own: its exit code is the editor's.
    terminal.expect(PROMPT);
    assert_eq!(world.lines("text", 2), ["hello", "world"]);
    assert!(!world.is_held("a"));
    assert_eq!(terminal.code_of("stty -a | grep -c ' icanon'"), "0", "the terminal was left raw");
}

#[test]
fn pipelines_work() {
    let world = World::sqlite();
    let mut terminal = Terminal::open(&world);
    terminal.line("$L run a -- yes | head -n 2; echo \"code=${PIPESTATUS[0]}=\"");
    assert_eq!(terminal.code(), (128 + 13).to_string());
    terminal.line("echo one two | $L run a -- wc -w | tr 2 x; echo \"code=${PIPESTATUS[1]}=\"");
    terminal.expect("x");
    assert_eq!(terminal.code(), "0");
    // A command in the same pipeline that reads the terminal.
    terminal.line("$L run a -- echo shown | sh -c 'cat; read key < /dev/tty; echo got $key'");
    terminal.expect("shown");
    terminal.line("k");
    terminal.expect("got k");
    terminal.expect(PROMPT);
}

#[test]
fn a_hang_up_ends_the_job() {
    let world = World::sqlite();
    let mut terminal = Terminal::open(&world);
    terminal.line("$L run a -- sh -c 'echo $$ > pid; exec sleep 60'");
    let pid = world.lines("pid", 1).remove(0);
    let mut shell = terminal.shell.take().expect("open");
    // The window is closed.
    drop(terminal);
    shell.signal(rustix::process::Signal::HUP);
    shell.wait();
    wait_for("the command's end", || (!is_alive(&pid)).then_some(()));
    wait_for("the lock to be free", || (!world.is_held("a")).then_some(()));
}

#[test]
fn a_waiting_run_shows_the_holder() {
    let world = World::sqlite();
    let mut holder = Job::start(&mut world.run(&["--owner", "backup", "a", "--", "sh", "-c", "echo >> in; sleep 60"]));
    world.lines("in", 1);
    let mut terminal = Terminal::open(&world);
    terminal.line("$L run a -- echo inside");
    terminal.expect("waiting for a · held by backup@");
    terminal.expect("1st in line");
    holder.signal(rustix::process::Signal::TERM);
    // The status line is cleared before other output.
    let before = terminal.expect("inside");
    assert!(before.ends_with("\r\u{1b}[2K"), "{before:?}");
    holder.wait();
    terminal.expect(PROMPT);
}
