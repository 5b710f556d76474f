// Package node puts the parts of one process together: the engine with its server and its line to the
// scheduler in a worker, the server and its line in a dedicated server, the scheduler where a process
// has to hold it. It is what libpaceline.so and the paceline command are made of.
package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/policy"
	"github.com/paceline/paceline/internal/version"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/scheduler"
	"github.com/paceline/paceline/server"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/shm"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// leaveTimeout bounds how long a worker that shuts down keeps its server for the others, beside the peer timeout, for which
// one of them may be stopped.
const leaveTimeout = 10 * time.Second

// Worker is one worker process in one round of the job.
type Worker struct {
	Settings    settings.Settings
	Membership  *membership.View
	Engine      *worker.Engine
	Control     *control.Client
	Homogeneous bool // every host has as many workers as any other

	log         *zap.Logger
	policy      *policy.Policy
	compression string // what the others must have too
	server      *server.Server
	uplink      *worker.Uplink // of a server that sums for this host; else nil
	listeners   transport.Listeners
	profiles    *profiles
	trials      *os.File // the log of autotuning; nil for none
	standby     *standby // of the scheduler; nil for none
	registered

	mu      sync.Mutex // also behind which server changes
	early   *wire.Lost // a node that was lost before there was an Engine to tell
	started bool       // the Engine has
}

// News is what a launcher learns of its processes.
type News = scheduler.News

// Options are what a process adds to its settings.
type Options struct {
	Scheduler  string                                  // a worker's: address of the scheduler, host:port; Settings.Scheduler where ""
	Alloc      func(n int) []byte                      // a worker's: memory for outputs whose size only the engine knows; nil for Go's
	Gathering  func(worker.Gathering)                  // a worker's: told what becomes of operations, and then calls Engine.Flush; may be nil
	Tuned      func(over bool)                         // a worker's: told when a search has ended, or begins again (worker.Tuning.Over); may be nil
	Workers    int                                     // a scheduler's: how many workers its process starts; 0: not known
	Beside     bool                                    // a scheduler's: they are all on its process's host
	Log        *zap.Logger                             // nil for the Logger of the process's role
	Seats      func(wire.Seat, func(wire.Seat, error)) // a scheduler's: of a launcher whose job changes its size; else nil
	News       func(News)                              // a scheduler's: of a launcher; else nil
	Transports *transport.Set                          // nil for those that the settings ask for
	Arena      *shm.Arena                              // a worker's: memory that it lends the servers of its host; nil for none
	standby    bool                                    // a scheduler's: it waits for its Lead
}

// complete fills in what is nil.
func (o *Options) complete(s *settings.Settings, role string, rank int) (err error) {
	if o.Log == nil {
		if o.Log, err = Logger(s.LogLevel, role, rank); err != nil {
			return err
		}
	}
	if o.Transports == nil {
		o.Transports, err = transports(s, o.Arena, o.Log)
	}
	return err
}

// StartWorker joins the next round of the job: it waits for all other ranks until the start timeout.
func StartWorker(ctx context.Context, s settings.Settings, o Options) (_ *Worker, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.StartTimeout)
	defer cancel()
	if err := o.complete(&s, "worker", s.Rank); err != nil {
		return nil, err
	}
	kinds := o.Transports
	w := &Worker{Settings: s, log: o.Log, registered: registered{kinds: kinds}}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if err := checkSync(&s, s.Size); err != nil {
		return nil, worker.Invalid(err)
	}
	if w.policy, w.compression, err = jobCompression(s.Compression); err != nil {
		return nil, worker.Invalid(err)
	}
	if w.profiles, err = openProfiles(&s, o.Log); err != nil {
		return nil, err
	}
	if err := w.openTrials(); err != nil {
		return nil, err
	}
	if err := tryTimeline(s.Timeline); err != nil {
		return nil, err
	}
	if s.Servers != "dedicated" || w.offersHostSums() {
		if err := w.listen(kinds); err != nil {
			return nil, err
		}
	}
	if s.Standby {
		running := ""
		if s.EmbedScheduler != "" {
			running = o.Scheduler
		}
		if w.standby, err = openStandby(&s, running, kinds, o.Log); err != nil {
			return nil, err
		}
	}
	if err := w.register(ctx, kinds.Required(), cmp.Or(o.Scheduler, s.Scheduler)); err != nil {
		return nil, err
	}
	w.cut()
	if w.uplink != nil && w.Membership.Now().HostSums().Of(s.Rank) == nil {
		w.closeServer()
	}
	w.makeEngine(w.engineConfig(kinds, o))
	var local worker.Local
	if w.server != nil && !s.Elastic { // there it is one among others, from which keys come and to which they go (decision 87)
		var notices server.Notices = w.Engine
		if w.uplink != nil {
			w.uplink.Attach(w.Engine)
			notices = worker.HostNotices{Engine: w.Engine}
		}
		l, err := w.server.Local(s.Rank, notices)
		if err != nil {
			return nil, err
		}
		local = l
	}
	if err := w.Engine.Start(ctx, local); err != nil {
		return nil, err
	}
	w.mu.Lock()
	w.started = true
	w.mu.Unlock()
	for _, b := range o.Arena.Blocks() {
		w.Register(b)
	}
	w.place()
	return w, nil
}

// tryTimeline reports a trace that this process could not write, before others count on its rank.
func tryTimeline(path string) error {
	if path == "" {
		return nil
	}
	f, err := os.Create(path)
	if err != nil {
		return worker.Invalid(fmt.Errorf("PACELINE_TIMELINE: %w", err))
	}
	return f.Close()
}

// offersHostSums reports whether this process holds a server that sums for its host, should that have more workers and no server
// of the job.
func (w *Worker) offersHostSums() bool {
	s := &w.Settings
	return s.HostSums && s.Servers == "dedicated" && !s.Elastic && s.Size > 1 && s.LocalSize != 1
}

// closeServer ends the server that this process holds.
func (w *Worker) closeServer() {
	w.mu.Lock()
	server := w.server
	w.server, w.uplink = nil, nil
	w.mu.Unlock()
	w.listeners.Close()
	server.Close()
}

// held is the server that this process holds, or nil.
func (w *Worker) held() *server.Server {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.server
}

// listen opens the server that this process holds.
func (w *Worker) listen(kinds *transport.Set) error {
	s := &w.Settings
	host, err := s.ListenHost()
	if err != nil {
		return err
	}
	if w.listeners, err = kinds.Listen(net.JoinHostPort(host, "0")); err != nil {
		return err
	}
	w.listeners.Expect(s.Size * connections(s))
	var sums *server.Host
	if s.Servers == "dedicated" {
		w.uplink = worker.NewUplink()
		sums = &server.Host{Rank: s.Rank, Uplink: w.uplink}
	}
	w.server = newServer(&w.Settings, s.Rank, w.log, func(l wire.Lost) { w.Control.ReportLost(l) }, sums)
	serve(w.server, w.listeners, w.log)
	return nil
}

func (w *Worker) register(ctx context.Context, tr transport.Transport, address string) (err error) {
	s := &w.Settings
	config := control.Config{
		Transport: tr, Address: address, Attempt: s.PeerTimeout / 2, Hello: wire.Hello{Role: wire.RoleWorker, Rank: s.Rank},
		Log: w.log, OnLost: w.lost, OnRoster: w.begin, Progress: w.progress,
	}
	if w.standby != nil {
		config.Lead = w.standby.lead
	}
	w.Control, err = control.Dial(ctx, config)
	if err != nil {
		return fmt.Errorf("rank %d: %w", s.Rank, err)
	}
	me := wire.Node{
		Role: wire.RoleWorker, Rank: s.Rank, LocalRank: s.LocalRank, LocalSize: s.LocalSize,
		Host: s.Host, PID: os.Getpid(), Addresses: w.listeners.Addresses(), Standby: w.standby.at(), HostSums: w.uplink != nil, Version: version.String(),
	}
	alike := s.Alike()
	alike["PACELINE_COMPRESSION"] = w.compression
	_, err = w.Control.Register(ctx, wire.Register{Node: me, Workers: s.Size, Dedicated: s.NumServers, Placement: s.Placement, Elastic: s.Elastic, LauncherRound: s.ElasticRound, Alike: alike})
	if err != nil {
		return fmt.Errorf("rank %d cannot join the job: %w", s.Rank, err)
	}
	return nil
}

// begin is called with the round's first epoch, before Register returns, and then with each that follows: from the first on others
// connect.
func (w *Worker) begin(e *membership.Epoch) {
	w.mu.Lock()
	engine, server := w.Engine, w.server
	if w.Membership == nil {
		w.Membership = membership.NewView(e)
	}
	if engine == nil { // what is made later begins with it
		if _, err := w.Membership.Follow(e); err != nil {
			w.log.Error("an epoch that cannot follow", zap.Error(err))
		}
	}
	w.mu.Unlock()
	if server != nil {
		server.Begin(e)
	}
	if engine != nil {
		engine.Follow(e)
	}
}

func (w *Worker) makeEngine(c worker.Config) {
	w.mu.Lock()
	engine := worker.New(c)
	w.Engine = engine
	early := w.early
	w.mu.Unlock()
	if early != nil {
		engine.Lost(*early)
	}
}

// lost handles the scheduler's message that the job has lost a node.
func (w *Worker) lost(l wire.Lost) {
	w.mu.Lock()
	engine := w.Engine
	w.early = &l
	w.mu.Unlock()
	if engine != nil {
		engine.Lost(l)
	}
}

// progress is what the scheduler hears when somebody asks for the state of the job.
func (w *Worker) progress() (p wire.Progress) {
	w.mu.Lock()
	started, server := w.started, w.server
	w.mu.Unlock()
	if started {
		p = w.Engine.Progress()
	}
	if server != nil {
		p.Waits, p.Served = server.Waits(), server.Served()
	}
	return p
}

// The size of partitions where no setting says it. A server sends its first results when
// its first partitions are complete. A dedicated server's link sends nothing until then, so small partitions are better;
// where each link carries pushes and results, it is never idle. But an urgent partition waits for the one that is leaving, on its way
// to the server and back: between hosts that takes long (decision 121).
const (
	embeddedPartition  = 4 << 20
	spreadPartition    = 512 << 10
	dedicatedPartition = 256 << 10
)

// cut chooses the size of partitions, unless a setting has.
func (w *Worker) cut() {
	if w.Settings.PartitionBytes > 0 {
		return
	}
	epoch := w.Membership.Now()
	founders := epoch.Servers[:epoch.Founders()] // ranks hear of joins and losses at different moments, and have to cut alike
	switch {
	case slices.ContainsFunc(founders, func(s membership.Server) bool { return s.Rank == membership.Dedicated }):
		w.Settings.PartitionBytes = dedicatedPartition
	case epoch.Spread():
		w.Settings.PartitionBytes = spreadPartition
	default:
		w.Settings.PartitionBytes = embeddedPartition
	}
}

func (w *Worker) engineConfig(kinds *transport.Set, o Options) worker.Config {
	s := &w.Settings
	return worker.Config{
		Rank: s.Rank, Membership: w.Membership, Transports: kinds, Control: w.Control,
		PartitionBytes: int(s.PartitionBytes), Fusion: int(s.FusionBytes), Credit: s.CreditBytes, Conns: s.Connections,
		DeclareTimeout: s.StartTimeout, PeerTimeout: s.PeerTimeout, Patience: agreement.Patience{Warning: s.StallWarning, Shutdown: s.StallShutdown, Margin: s.PeerTimeout + time.Second}, Log: w.log, Alloc: o.Alloc,
		Profiles: s.PlacementPeriod, Tuning: w.tuning(o.Tuned), Crowded: o.Gathering != nil && w.Crowded(), Gathering: o.Gathering,
		Policy: w.policy, LoadPolicy: Compression, Seed: uint64(s.Seed),
	}
}

// Full reports whether this host has no core to spare for anything but its workers.
func (w *Worker) Full() bool {
	here := 0
	for _, n := range w.Membership.Now().Workers {
		if n.Host == w.Settings.Host {
			here++
		}
	}
	return here >= runtime.GOMAXPROCS(0)
}

// Crowded reports whether the job runs on this host alone, and fills it.
func (w *Worker) Crowded() bool {
	epoch, here := w.Membership.Now(), w.Settings.Host
	return w.Full() && !slices.ContainsFunc(epoch.Servers, func(s membership.Server) bool { return s.Host != here }) && !epoch.Spread()
}

// place fills in the local and cross numbers that the launcher did not give: from the hosts of the
// workers, in the order of their ranks.
func (w *Worker) place() {
	s, workers := &w.Settings, w.Membership.Now().Workers
	local := make([]int, len(workers)) // local rank of each worker
	size := map[string]int{}
	for i, n := range workers {
		local[i] = size[n.Host]
		size[n.Host]++
	}
	w.Homogeneous = !slices.ContainsFunc(workers, func(n membership.Worker) bool { return size[n.Host] != size[workers[s.Rank].Host] })
	if s.LocalRank < 0 {
		s.LocalRank = local[s.Rank]
	}
	if s.LocalSize < 0 {
		s.LocalSize = size[workers[s.Rank].Host]
	}
	if s.CrossRank >= 0 && s.CrossSize > 0 {
		return
	}
	s.CrossRank, s.CrossSize = 0, 0
	for i := range workers {
		if local[i] == local[s.Rank] {
			if i < s.Rank {
				s.CrossRank++
			}
			s.CrossSize++
		}
	}
}

// Tally is what the server in this process has counted in this round: pushes that it admitted and dropped,
// and pulls that had to wait. It is zero where this process holds no server.
func (w *Worker) Tally() server.Tally {
	if s := w.held(); s != nil {
		return s.Tally()
	}
	return server.Tally{}
}

// RemoveSet removes a process set, as every worker of the job does. Operations in flight on it end with an error: some of
// its ranks may never start them.
func (w *Worker) RemoveSet(ctx context.Context, id uint32) error {
	if err := w.Engine.RemoveSet(ctx, id); err != nil {
		return err
	}
	if s := w.held(); s != nil {
		s.RemoveSet(wire.RemovedSet{Round: w.Membership.Now().Round, ID: id})
	}
	return nil
}

// Shutdown leaves the job. The server of this process stays until all other workers have left too, or a
// deadline has passed. There is no deadline while it holds a value, nor in an elastic job: the others continue to train with it, each at
// its own pace, and the loss of one is detected.
func (w *Worker) Shutdown() { w.Leave(context.Background()) }

// Leave is Shutdown until the end of stay, with which the server of this process leaves too.
func (w *Worker) Leave(stay context.Context) {
	ctx, cancel := context.WithTimeout(stay, leaveTimeout+w.Settings.PeerTimeout)
	defer cancel()
	lost := errors.Is(w.Engine.Err(), worker.ErrPeerLost)
	w.Engine.Shutdown(ctx)
	if server := w.server; server != nil && w.Settings.StallWarning > 0 {
		defer time.AfterFunc(w.Settings.StallWarning, func() { w.stays(server) }).Stop()
	}
	if w.server != nil && !lost {
		w.Control.Farewell()
	}
	switch {
	case w.server == nil || lost:
	case w.Settings.Elastic:
		w.server.Outlast(stay)
	default:
		deserted := w.server.Deserted()
		select {
		case <-deserted:
		case <-ctx.Done():
			if w.server.Holds() {
				select {
				case <-deserted:
				case <-stay.Done():
				}
			} else {
				w.log.Info("other workers have not left; this rank's server leaves after the timeout")
			}
		}
	}
	w.close()
}

// stays says why this process has not ended: ranks may train on for hours, or hang.
func (w *Worker) stays(server *server.Server) {
	if ranks := server.NeededBy(); len(ranks) > 0 {
		w.log.Warn(fmt.Sprintf("rank %d has shut down, and its server stays for ranks %v, which have not", w.Settings.Rank, ranks))
	}
}

func (w *Worker) close() {
	defer w.profiles.close()
	defer w.trials.Close() // nil gives an error that nobody needs
	if w.Engine != nil {
		w.Engine.Shutdown(context.Background())
	}
	if w.server != nil {
		w.closeServer()
	}
	w.end()
	if w.Control != nil {
		_ = w.Control.Close()
	}
	w.standby.close() // after the goodbye: one that is refused before has ended without
}
