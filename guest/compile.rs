//! A load like that of compiling: `make -j2` over generated sources, again and again, until it is told to rest.
//!
//! Every file is compiled by a process of its own. It reads the source, takes it apart into tokens and names, makes a
//! tree of each function in memory that it allocates, works over that tree in passes which each allocate the next one
//! and free the one before, keeps what comes out until the end of the file, writes an object file and ends. A unit of
//! work is one function. The unit's byte in the compiler's output pipe is written when the function is compiled, so
//! that work is counted while a file is still being compiled.
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::hint::black_box;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const JOBS: usize = 2;
const FILES: usize = 24;
const FUNCTIONS: usize = 48;
const STATEMENTS: usize = 40;
const PASSES: u64 = 4;
/// How often the count is told while something is compiled.
const REPORT: Duration = Duration::from_millis(20);

/// What both sides of the load see.
#[derive(Default)]
pub struct Load {
    running: AtomicBool,
    /// Threads that make or report.
    busy: AtomicU64,
    units: AtomicU64,
}

/// A node of a function's tree.
#[derive(Clone, Copy)]
struct Node {
    name: usize,
    value: u64,
    /// What later passes found out about it.
    facts: [u64; 30],
}

impl Load {
    /// Compiles from now on.
    pub fn start(self: &Arc<Self>) {
        if self.running.swap(true, Ordering::SeqCst) {
            return;
        }
        write_sources();
        for job in 0..JOBS {
            self.spawn(move |load| load.make(job));
        }
        self.spawn(Self::report);
    }

    /// Returns when the files that are being compiled are done.
    pub fn rest(&self) {
        self.running.store(false, Ordering::SeqCst);
        while self.busy.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(REPORT);
        }
    }

    fn spawn(self: &Arc<Self>, work: impl FnOnce(&Self) + Send + 'static) {
        self.busy.fetch_add(1, Ordering::SeqCst);
        let load = Arc::clone(self);
        std::thread::spawn(move || {
            work(&load);
            load.busy.fetch_sub(1, Ordering::SeqCst);
        });
    }

    /// Every second file, starting with its own number, over and over.
    fn make(&self, job: usize) {
        for file in (job..FILES).step_by(JOBS).cycle() {
            if !self.running.load(Ordering::SeqCst) {
                return;
            }
            let mut compiler = Command::new("/proc/self/exe")
                .args(["compile", &source(file), &object(file)])
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .expect("the compiler is this program");
            let mut done = compiler.stdout.take().expect("it was asked for");
            let mut units = [0; 64];
            while let Ok(count @ 1..) = done.read(&mut units) {
                self.units.fetch_add(count as u64, Ordering::Relaxed);
            }
            let status = compiler.wait().expect("it was started");
            assert!(status.success(), "a compiler ended with {status}");
        }
    }

    fn report(&self) {
        while self.running.load(Ordering::SeqCst) {
            super::say(format_args!("units={}", self.units.load(Ordering::Relaxed)));
            std::thread::sleep(REPORT);
        }
    }
}

/// The compiler: a process of its own.
pub fn compile(source: &str, object: &str) {
    let text = fs::read_to_string(source).expect("the source was written");
    let mut names = HashMap::new();
    let mut kept = Vec::new();
    let mut code = Vec::new();
    let mut done = std::io::stdout();
    for function in text.split_inclusive("}\n") {
        let mut tree = parse(function, &mut names);
        for pass in 0..PASSES {
            tree = optimise(&tree, pass);
        }
        for node in &tree {
            let word = node.facts.iter().fold(node.value, |sum, fact| sum.rotate_left(1) ^ fact);
            code.extend_from_slice(&word.to_le_bytes());
        }
        kept.push(tree);
        let told = done.write_all(b".").and_then(|()| done.flush());
        told.expect("somebody counts");
    }
    fs::write(object, code).expect("there is room for object files");
    black_box((kept, names.len()));
}

fn parse<'a>(function: &'a str, names: &mut HashMap<&'a str, usize>) -> Vec<Node> {
    let tokens: Vec<&str> = function.split(|c: char| !c.is_alphanumeric()).filter(|token| !token.is_empty()).collect();
    let node = |token: &&'a str| {
        let next = names.len();
        let name = *names.entry(token).or_insert(next);
        let value = token.bytes().fold(name as u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        Node { name, value, facts: [0; 30] }
    };
    tokens.iter().map(node).collect()
}

/// A new tree from the old one: every node looks at its neighbours.
fn optimise(tree: &[Node], pass: u64) -> Vec<Node> {
    let mut better = Vec::with_capacity(tree.len());
    for (at, node) in tree.iter().enumerate() {
        let neighbour = &tree[(at * 7 + node.name) % tree.len()];
        let mut node = *node;
        for (fact, other) in node.facts.iter_mut().zip(&neighbour.facts) {
            *fact = fact.wrapping_add(neighbour.value ^ other.rotate_left(9)).wrapping_add(pass);
        }
        better.push(node);
    }
    black_box(better)
}

fn source(file: usize) -> String {
    format!("/src/{file}.c")
}

fn object(file: usize) -> String {
    format!("/obj/{file}.o")
}

fn write_sources() {
    for folder in ["/src", "/obj"] {
        fs::create_dir_all(folder).expect("the guest's root can be written");
    }
    for file in 0..FILES {
        let mut text = String::new();
        for function in 0..FUNCTIONS {
            // Writing to a string does not fail.
            let _ = writeln!(text, "long f{file}_{function}(long a, long b) {{");
            for line in 0..STATEMENTS {
                let (x, y) = ((function * 7 + line * 3) % 97, (file * 5 + line) % 89);
                let _ = writeln!(text, "    long v{line} = a * {x} + b * {y} - g{x} + h{y}(v{line}, {line});");
            }
            text.push_str("}\n");
        }
        fs::write(source(file), text).expect("there is room for sources");
    }
}
