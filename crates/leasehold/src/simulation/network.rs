//! Connections between processes and servers: ordered streams in both directions that are delayed, stalled, cut or
//! killed.

use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::time::Duration;

use super::coverage::Situation;
use super::plan::{Latency, Plan};
use super::random::Random;
use super::server::{Command, Node, Reply, ServerClock, Surroundings};
use super::session::Session;
use super::world::World;
use crate::clock::Moment;
use crate::machine::{InboxId, Message};
use crate::store::StoreErrorKind;

pub(super) type ConnectionId = usize;

pub(super) struct Network {
    pub(super) connections: Vec<Connection>,
    pub(super) nodes: Vec<Node>,
    /// The primary.
    pub(super) primary: usize,
    /// The server that a new connection reaches.
    pub(super) resolves_to: usize,
    /// Whether new connections are accepted.
    pub(super) is_up: bool,
    /// The server runs no command before this moment.
    pub(super) hangs_until: Moment,
    pub(super) clock: ServerClock,
    latency: Latency,
    seed: u64,
}

pub(super) struct Connection {
    pub(super) process: usize,
    pub(super) inbox: InboxId,
    node: usize,
    session: Weak<Session>,
    client_open: bool,
    server_open: bool,
    /// The client is gone: the server closes its end after it has run the requests in flight.
    hung_up: bool,
    subscribed: bool,
    /// Requests in flight, with the time of arrival.
    up: VecDeque<(Moment, VecDeque<Command>)>,
    down: VecDeque<(Moment, Down)>,
    up_at: Moment,
    down_at: Moment,
    /// Nothing arrives at either end before this time.
    pub(super) held_until: Moment,
    /// Pushes are lost until this time.
    pub(super) muted_until: Moment,
    pub(super) duplicate_next: bool,
    random: Random,
}

/// What a server sends.
#[derive(Debug, Clone)]
pub(super) enum Down {
    Reply(Reply),
    Push(Message),
    Probe(u64),
    Closed,
}

impl Network {
    pub(super) fn new(plan: &Plan) -> Self {
        Self {
            connections: Vec::new(),
            nodes: vec![Node::new()],
            primary: 0,
            resolves_to: 0,
            is_up: true,
            hangs_until: Moment::from_boot(Duration::ZERO),
            clock: ServerClock { faster_ppm: plan.setup.faster_ppm },
            latency: plan.setup.latency,
            seed: plan.seed,
        }
    }

    fn is_listening(&self, node: usize, inbox: &InboxId) -> bool {
        self.connections.iter().any(|c| c.hears(inbox) && self.counts(node, c))
    }

    /// Whether a subscriber counts: only one that is connected to this server does.
    #[expect(clippy::unused_self, reason = "a planted bug looks at more")]
    fn counts(&self, node: usize, connection: &Connection) -> bool {
        connection.node == node
    }

    pub(super) fn primary(&mut self) -> &mut Node {
        let primary = self.primary;
        &mut self.nodes[primary]
    }

    /// The open connections of a process to any server.
    pub(super) fn of_process(&self, process: usize) -> Vec<ConnectionId> {
        let is_open = |c: &Connection| c.process == process && (c.client_open || c.server_open);
        (0..self.connections.len()).filter(|id| is_open(&self.connections[*id])).collect()
    }
}

impl Connection {
    fn hears(&self, inbox: &InboxId) -> bool {
        self.server_open && self.subscribed && self.inbox == *inbox
    }

    fn delay(&mut self, latency: Latency, is_quiet: bool) -> Duration {
        if is_quiet {
            return self.random.ms(0, latency.usual_ms.min(2));
        }
        if latency.spike_one_in > 0 && self.random.one_in(latency.spike_one_in) {
            return self.random.ms(0, latency.spike_ms);
        }
        self.random.ms(0, latency.usual_ms)
    }
}

impl World {
    /// Opens a connection for a session. `None`: no server can be reached.
    pub(super) fn open_connection(&self, process: usize, inbox: InboxId) -> Option<ConnectionId> {
        let now = Moment::now();
        let mut network = self.network.borrow_mut();
        if !network.is_up {
            return None;
        }
        let id = network.connections.len();
        let random = Random::new(network.seed, 1_000 + id as u64);
        let node = network.resolves_to;
        network.connections.push(Connection {
            process,
            inbox,
            node,
            session: Weak::new(),
            client_open: true,
            server_open: true,
            hung_up: false,
            subscribed: false,
            up: VecDeque::new(),
            down: VecDeque::new(),
            up_at: now,
            down_at: now,
            held_until: now,
            muted_until: now,
            duplicate_next: false,
            random,
        });
        Some(id)
    }

    pub(super) fn attach(&self, id: ConnectionId, session: &Rc<Session>) {
        self.network.borrow_mut().connections[id].session = Rc::downgrade(session);
    }

    /// A client sends a request.
    pub(super) fn send(&self, id: ConnectionId, commands: Vec<Command>) {
        let (now, is_quiet) = (Moment::now(), self.is_quiet());
        let mut network = self.network.borrow_mut();
        let latency = network.latency;
        let connection = &mut network.connections[id];
        if !connection.client_open {
            return;
        }
        let at = (now + connection.delay(latency, is_quiet)).max(connection.up_at).max(connection.held_until);
        connection.up_at = at;
        connection.up.push_back((at, commands.into()));
        drop(network);
        self.executor.at(at, move |world| world.serve(id));
    }

    /// The client's end is closed. What it sent may still run, until the server notices.
    pub(super) fn close_by_client(&self, id: ConnectionId, noticed_after: Duration) {
        let now = Moment::now();
        let mut network = self.network.borrow_mut();
        let connection = &mut network.connections[id];
        if !std::mem::replace(&mut connection.client_open, false) {
            return;
        }
        connection.down.clear();
        let at = (now + noticed_after).max(connection.up_at);
        drop(network);
        self.executor.at(at, move |world| {
            let mut network = world.network.borrow_mut();
            network.connections[id].hung_up = true;
            drop(network);
            world.serve(id);
        });
    }

    /// Closes the server's end and drops the requests in flight; the client notices later.
    pub(super) fn close_by_server(&self, id: ConnectionId, read_after: Duration) {
        let mut network = self.network.borrow_mut();
        let connection = &mut network.connections[id];
        if !connection.server_open {
            return;
        }
        connection.server_open = false;
        connection.up.clear();
        let at = Moment::now() + read_after;
        if connection.client_open {
            drop(network);
            self.send_down(id, Down::Closed, at);
        }
    }

    /// Cuts a connection: the client notices at once. `forwards`: what it sent still arrives and runs.
    pub(super) fn cut(&self, id: ConnectionId, forwards: bool, noticed_after: Duration) {
        let mut network = self.network.borrow_mut();
        let connection = &mut network.connections[id];
        if !forwards {
            // A request that ran in part is cut there.
            connection.up.clear();
        }
        let session = connection.session.upgrade();
        drop(network);
        if let Some(session) = session {
            session.close(StoreErrorKind::Unreachable.into(), noticed_after);
        }
    }

    /// Runs the requests of a connection that have arrived.
    fn serve(self: &Rc<Self>, id: ConnectionId) {
        loop {
            let now = Moment::now();
            let mut guard = self.network.borrow_mut();
            let network = &mut *guard;
            let connection = &mut network.connections[id];
            if !connection.server_open {
                return;
            }
            if network.hangs_until > now {
                let at = network.hangs_until;
                drop(guard);
                self.executor.at(at, move |world| world.serve(id));
                return;
            }
            let Some((at, commands)) = connection.up.front_mut() else {
                if connection.hung_up {
                    connection.server_open = false;
                }
                return;
            };
            if *at > now {
                return;
            }
            let Some(command) = commands.pop_front() else {
                connection.up.pop_front();
                continue;
            };
            if commands.is_empty() {
                connection.up.pop_front();
            } else if connection.random.one_in(12) {
                // The network splits a request: other clients' commands run in between.
                let pause = connection.delay(network.latency, false);
                let (at, _) = connection.up.front_mut().expect("seen above");
                *at = now + pause;
                connection.up_at = connection.up_at.max(now + pause);
                let again = now + pause;
                drop(guard);
                self.executor.at(again, move |world| world.serve(id));
                self.run(id, command);
                continue;
            }
            drop(guard);
            self.run(id, command);
        }
    }

    /// Runs one command and sends its reply and its pushes.
    fn run(self: &Rc<Self>, id: ConnectionId, command: Command) {
        let now = Moment::now();
        let mut guard = self.network.borrow_mut();
        let network = &mut *guard;
        let (node, process) = (network.connections[id].node, network.connections[id].process);
        if !network.connections[id].client_open && command.writes() {
            self.saw(Situation::OldConnectionRan);
        }
        let reply = match &command {
            Command::Kill(previous) => {
                drop(guard);
                let reply = self.kill(id, *previous);
                return self.reply(id, reply);
            }
            Command::Subscribe => {
                network.connections[id].subscribed = true;
                drop(guard);
                return self.reply(id, Reply::Done);
            }
            Command::Probe(number) => {
                let inbox = network.connections[id].inbox.clone();
                let heard = network.is_listening(node, &inbox);
                drop(guard);
                self.publish(node, &inbox, &Down::Probe(*number));
                return self.reply(id, Reply::Exists(heard));
            }
            _ => {
                let before = self.checks.borrow().before(network, node, &command, now);
                let mut told = Vec::new();
                let heard: Vec<InboxId> = network
                    .connections
                    .iter()
                    .filter(|c| c.server_open && c.subscribed && network.counts(node, c))
                    .map(|c| c.inbox.clone())
                    .collect();
                let mut listening = |inbox: &InboxId| heard.contains(inbox);
                let mut around = Surroundings {
                    clock: network.clock,
                    now,
                    listening: &mut listening,
                    told: &mut told,
                    sweep: self.plan.setup.sweep,
                };
                let reply = network.nodes[node].run(&mut around, &command);
                if node == network.primary {
                    let after = self.checks.borrow().before(network, node, &command, now);
                    let is_listening = |inbox: &InboxId| network.is_listening(node, inbox);
                    let found =
                        self.checks.borrow_mut().ran(self, &command, before, after, network.clock, &is_listening);
                    drop(guard);
                    if let Some(what) = found {
                        self.fail(|| what);
                    }
                } else {
                    drop(guard);
                    if matches!(reply, Reply::Error(StoreErrorKind::ReadOnly)) {
                        self.saw(Situation::ReplicaRefused);
                    }
                }
                for (inbox, message) in told {
                    self.publish(node, &inbox, &Down::Push(message));
                }
                reply
            }
        };
        self.tell(|| {
            let asks = command.words();
            format!("the server answers {}, who asked for {asks}: {}", self.name_of(process), reply.words())
        });
        self.reply(id, reply);
    }

    /// Sends a message to every connection that listens at an inbox.
    fn publish(&self, node: usize, inbox: &InboxId, what: &Down) {
        let (now, is_quiet) = (Moment::now(), self.is_quiet());
        let network = self.network.borrow();
        let hears = |id: &ConnectionId| {
            let connection = &network.connections[*id];
            connection.hears(inbox) && network.counts(node, connection)
        };
        let receivers: Vec<ConnectionId> = (0..network.connections.len()).filter(hears).collect();
        drop(network);
        for id in receivers {
            let mut network = self.network.borrow_mut();
            let primary = network.primary;
            let connection = &mut network.connections[id];
            let process = connection.process;
            if connection.node != primary && matches!(what, Down::Push(Message::Granted { .. })) {
                drop(network);
                return self.fail(|| format!("{} was granted a lock at the old primary", self.name_of(process)));
            }
            if connection.muted_until > now && !is_quiet {
                drop(network);
                self.disturb(Some(process));
                self.tell(|| format!("a message to {} is lost: {what:?}", self.name_of(process)));
                continue;
            }
            let twice = matches!(what, Down::Push(_)) && std::mem::replace(&mut connection.duplicate_next, false);
            drop(network);
            self.send_down(id, what.clone(), now);
            if twice {
                self.saw(Situation::FaultDuplicate);
                self.send_down(id, what.clone(), now);
            }
        }
    }

    fn reply(&self, id: ConnectionId, reply: Reply) {
        self.send_down(id, Down::Reply(reply), Moment::now());
    }

    fn send_down(&self, id: ConnectionId, down: Down, from: Moment) {
        let is_quiet = self.is_quiet();
        let mut network = self.network.borrow_mut();
        let latency = network.latency;
        let connection = &mut network.connections[id];
        if !connection.client_open {
            return;
        }
        let at = (from + connection.delay(latency, is_quiet)).max(connection.down_at).max(connection.held_until);
        connection.down_at = at;
        connection.down.push_back((at, down));
        drop(network);
        self.executor.at(at, move |world| world.arrive(id));
    }

    /// Lets a process read what has arrived at a connection, unless it is stopped.
    pub(super) fn arrive(&self, id: ConnectionId) {
        let now = Moment::now();
        let mut network = self.network.borrow_mut();
        let connection = &mut network.connections[id];
        let Some(session) = connection.session.upgrade() else { return };
        if session.is_stopped() || !connection.client_open {
            return;
        }
        let mut arrived = Vec::new();
        while connection.down.front().is_some_and(|(at, _)| *at <= now) {
            arrived.extend(connection.down.pop_front().map(|(_, down)| down));
        }
        drop(network);
        session.read(arrived);
    }

    /// Ends a connection that a client has lost, on the server it was connected to.
    fn kill(&self, by: ConnectionId, previous: Option<ConnectionId>) -> Reply {
        if !self.plan.setup.can_kill {
            return Reply::Error(StoreErrorKind::NotPermitted);
        }
        let mut network = self.network.borrow_mut();
        let node = network.connections[by].node;
        if let Some(previous) = previous.map(|id| &mut network.connections[id])
            && previous.node == node
        {
            if !previous.up.is_empty() {
                self.saw(Situation::OldConnectionKilled);
            }
            previous.server_open = false;
            previous.up.clear();
        }
        Reply::Done
    }

    /// Closes every connection to a server.
    pub(super) fn close_all(&self, node: usize) {
        let open = {
            let network = self.network.borrow();
            let is_open = |id: &ConnectionId| network.connections[*id].node == node;
            (0..network.connections.len()).filter(is_open).collect::<Vec<_>>()
        };
        for id in open {
            self.close_by_server(id, Duration::ZERO);
        }
    }

    pub(super) fn is_on_primary(&self, id: ConnectionId) -> bool {
        let network = self.network.borrow();
        network.connections[id].node == network.primary
    }

    pub(super) fn name_of(&self, process: usize) -> String {
        let incarnation = self.processes.borrow().get(process).and_then(|p| p.as_ref().map(|p| p.incarnation));
        super::story::process_name(process, incarnation.unwrap_or(0))
    }
}
