package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/runfile"
	"github.com/paceline/paceline/internal/version"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/scheduler"
	"github.com/paceline/paceline/server"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

// Logger makes the log of a process: to standard error, from a level on, each line naming role and rank.
func Logger(level, role string, rank int) (*zap.Logger, error) {
	l, err := zapcore.ParseLevel(level)
	if err != nil {
		return nil, fmt.Errorf("log level: %w", err)
	}
	c := zap.NewProductionEncoderConfig()
	c.EncodeTime = zapcore.ISO8601TimeEncoder
	c.EncodeLevel = zapcore.LowercaseLevelEncoder
	c.ConsoleSeparator = " "
	who := "paceline " + role
	if rank >= 0 {
		who = fmt.Sprintf("%s %d", who, rank)
	}
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(c), zapcore.Lock(os.Stderr), l)).Named(who), nil
}

func newServer(s *settings.Settings, rank int, log *zap.Logger, lost func(wire.Lost), host *server.Host) *server.Server {
	return server.New(server.Config{
		Rank: rank, Log: log, Memory: s.ServerMemory, Fusion: int(s.FusionBytes), RankOrder: s.SumInRankOrder, Seed: uint64(s.Seed),
		StallWarning: s.StallWarning, StallShutdown: s.StallShutdown, Model: condition.BSP(), OnLost: lost, Host: host,
	})
}

func serve(s *server.Server, listeners transport.Listeners, log *zap.Logger) {
	for _, l := range listeners {
		go func() {
			if err := s.Serve(l); err != nil {
				log.Error("server stopped accepting", zap.Stringer("address", l.Addr()), zap.Error(err))
			}
		}()
	}
}

// RunServer is a dedicated server: it serves round after round until ctx ends.
func RunServer(ctx context.Context, s settings.Settings, listen string, o Options) error {
	if err := o.complete(&s, "server", -1); err != nil {
		return err
	}
	profiles, err := openProfiles(&s, o.Log)
	if err != nil {
		return err
	}
	defer profiles.close()
	kinds, log := o.Transports, o.Log
	if listen == "" {
		host, err := s.ListenHost()
		if err != nil {
			return err
		}
		listen = net.JoinHostPort(host, "0")
	} else if listen, err = s.Reached(listen); err != nil {
		return err
	}
	listeners, err := kinds.Listen(listen)
	if err != nil {
		return err
	}
	var line *control.Client
	began := time.Now()
	srv := newServer(&s, membership.Dedicated, log, func(l wire.Lost) { line.ReportLost(l) }, nil)
	defer srv.Close()
	defer listeners.Close()
	begin := func(first *membership.Epoch) {
		listeners.Expect(len(first.Workers) * connections(&s)) // its own setting, which is mostly the workers'
		srv.Begin(first)
	}
	wanted := make(chan struct{}, 1)
	line, err = reach(ctx, log, control.Config{
		Transport: kinds.Required(), Address: s.Scheduler, Attempt: s.PeerTimeout / 2, Hello: wire.Hello{Role: wire.RoleServer},
		Log: log, OnLost: srv.Lost, OnRoster: begin, OnRemoved: srv.RemoveSet, Idle: func() bool { return idle(srv) },
		OnDrain: func() {
			select {
			case wanted <- struct{}{}:
			default: // it is known
			}
		},
		Progress: func() wire.Progress {
			return wire.Progress{Seconds: time.Since(began).Seconds(), Waits: srv.Waits(), Served: srv.Served()}
		},
	})
	if err != nil {
		if ctx.Err() != nil { // it was told to end
			return nil
		}
		return err
	}
	defer line.Close()
	serve(srv, listeners, log)
	log.Info("server listens", zap.Stringer("addresses", listeners.Addresses()), zap.String("scheduler", s.Scheduler))
	me := wire.Node{Role: wire.RoleServer, Host: s.Host, PID: os.Getpid(), Addresses: listeners.Addresses(), Version: version.String()}
	if _, err := line.Register(ctx, wire.Register{Node: me, Elastic: s.Elastic, Alike: s.Alike()}); err != nil && ctx.Err() == nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			if !leave(true, srv, line, &s, log) && srv.Elastic() && !idle(srv) {
				return ErrNotEmpty
			}
			return nil
		case <-wanted:
			if leave(false, srv, line, &s, log) {
				return nil
			}
		case <-line.Refused():
			return line.Err()
		}
	}
}

// patience is how often a server whose scheduler does not answer says so.
const patience = 10 * time.Second

// reach dials the scheduler until ctx ends.
func reach(ctx context.Context, log *zap.Logger, config control.Config) (*control.Client, error) {
	for {
		attempt, cancel := context.WithTimeout(ctx, patience)
		line, err := control.Dial(attempt, config)
		late := errors.Is(attempt.Err(), context.DeadlineExceeded)
		cancel()
		if err == nil || !late || ctx.Err() != nil {
			return line, err
		}
		log.Warn("waiting for the scheduler at "+config.Address+", which does not answer", zap.Error(err))
	}
}

// Scheduler is a scheduler that this process holds.
type Scheduler struct {
	*scheduler.Scheduler
	Address string // host:port at which it listens

	settings settings.Settings
	log      *zap.Logger
	file     *runfile.File // while the job is published
	profiles *profiles     // nil in a worker, which has its own
	listener transport.Listener
}

// Serves reports whether nodes with other settings can be the scheduler's: those with its secret and its peer timeout.
func (s *Scheduler) Serves(other *settings.Settings) bool {
	return s.settings.PeerTimeout == other.PeerTimeout && bytes.Equal(s.settings.JobSecret, other.JobSecret)
}

// StartScheduler starts a scheduler at a listening address, whose port may be 0.
func StartScheduler(s settings.Settings, listen string, o Options) (*Scheduler, error) {
	if err := o.complete(&s, "scheduler", -1); err != nil {
		return nil, err
	}
	own := s.PeerTimeout
	if s.Role == "worker" { // rank 0, whose settings are compared
		own = 0
	}
	sched, err := scheduler.New(scheduler.Settings{PeerTimeout: own, LostAfter: s.PeerTimeout, Launched: o.Workers, Beside: o.Beside, Dedicated: s.NumServers, Placement: s.Placement, Seats: o.Seats, News: o.News,
		Standby: o.standby, Dial: o.Transports.Required().Dial}, o.Log)
	if err != nil {
		return nil, err
	}
	l, err := o.Transports.Required().Listen(listen)
	if err != nil {
		_ = sched.Close()
		err = fmt.Errorf("the scheduler cannot listen at %s: %w", listen, err)
		if s.Role == "worker" && errors.Is(err, syscall.EADDRINUSE) {
			err = fmt.Errorf("%w; set PACELINE_PORT, the same on all ranks, to a free port of this host", err)
		}
		return nil, err
	}
	workers := o.Workers
	if s.Role == "worker" {
		workers = s.Size
	}
	l.Expect(workers + s.NumServers)
	go func() {
		if err := sched.Serve(l); err != nil {
			o.Log.Error("scheduler stopped accepting", zap.Error(err))
		}
	}()
	made := &Scheduler{Scheduler: sched, Address: l.Addr().String(), settings: s, log: o.Log, listener: l}
	if s.Role == "worker" {
		return made, nil
	}
	if made.profiles, err = openProfiles(&s, o.Log); err != nil {
		_ = made.Close()
		return nil, err
	}
	return made, nil
}
