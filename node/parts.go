package node

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/version"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/scheduler"
	"github.com/paceline/paceline/server"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/tcp"
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

// Transport makes the transport that the settings ask for.
func Transport(s *settings.Settings, log *zap.Logger) (transport.Transport, error) {
	c := tcp.Config{
		Secret: s.JobSecret, PeerTimeout: s.PeerTimeout, SendBuffer: int(s.SendBuffer), Congestion: s.Congestion, Shards: 1, Log: log,
	}
	if c.Congestion == "system" {
		c.Congestion = ""
	}
	if s.Role == "server" {
		c.Shards = s.ServerShards
	}
	if s.TLSCert != "" {
		var err error
		if c.TLS, err = loadTLS(s); err != nil {
			return nil, err
		}
	}
	return tcp.New(c), nil
}

// loadTLS reads the certificate by which this node shows itself and the authority it trusts. Both
// ends of a connection show one.
func loadTLS(s *settings.Settings) (*tls.Config, error) {
	cert, err := tls.LoadX509KeyPair(s.TLSCert, s.TLSKey)
	if err != nil {
		return nil, fmt.Errorf("PACELINE_TLS_CERT and PACELINE_TLS_KEY: %w", err)
	}
	pem, err := os.ReadFile(s.TLSCA)
	if err != nil {
		return nil, fmt.Errorf("PACELINE_TLS_CA: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("PACELINE_TLS_CA: %s holds no certificate in PEM", s.TLSCA)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, RootCAs: pool,
		ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
	}, nil
}

func newServer(s *settings.Settings, log *zap.Logger, lost func(wire.Lost)) *server.Server {
	return server.New(server.Config{
		Log: log, Memory: s.ServerMemory, Fusion: int(s.FusionBytes), RankOrder: s.SumInRankOrder, Seed: uint64(s.Seed),
		StallWarning: s.StallWarning, StallShutdown: s.StallShutdown, Model: condition.BSP(), OnLost: lost,
	})
}

func serve(s *server.Server, l transport.Listener, log *zap.Logger) {
	go func() {
		if err := s.Serve(l); err != nil {
			log.Error("server stopped accepting", zap.Error(err))
		}
	}()
}

// RunServer is a dedicated server: it serves round after round until ctx ends.
func RunServer(ctx context.Context, s settings.Settings, listen string, log *zap.Logger) error {
	tr, err := Transport(&s, log)
	if err != nil {
		return err
	}
	return RunServerOver(ctx, tr, s, listen, log)
}

// RunServerOver is RunServer over a transport of the caller's.
func RunServerOver(ctx context.Context, tr transport.Transport, s settings.Settings, listen string, log *zap.Logger) error {
	if listen == "" {
		host, err := s.ListenHost()
		if err != nil {
			return err
		}
		listen = net.JoinHostPort(host, "0")
	}
	l, err := tr.Listen(listen)
	if err != nil {
		return err
	}
	var line *control.Client
	srv := newServer(&s, log, func(l wire.Lost) { line.ReportLost(l) })
	defer srv.Close()
	defer l.Close()
	line, err = control.Dial(ctx, control.Config{
		Transport: tr, Address: s.Scheduler, Hello: wire.Hello{Role: wire.RoleServer},
		BeatInterval: s.BeatInterval, LostAfter: s.PeerTimeout, Log: log, OnLost: srv.Lost, OnRoster: srv.Begin,
	})
	if err != nil {
		return err
	}
	defer line.Close()
	serve(srv, l, log)
	log.Info("server listens", zap.Stringer("address", l.Addr()), zap.String("scheduler", s.Scheduler))
	me := wire.Node{Role: wire.RoleServer, Host: s.Host, PID: os.Getpid(), Server: l.Addr().String(), Version: version.String()}
	if _, err := line.Register(ctx, wire.Register{Node: me}); err != nil && ctx.Err() == nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// Scheduler is a scheduler that this process holds.
type Scheduler struct {
	*scheduler.Scheduler
	Address string // host:port at which it listens
}

// StartScheduler starts a scheduler at a listening address, whose port may be 0.
func StartScheduler(s settings.Settings, listen string, log *zap.Logger) (*Scheduler, error) {
	tr, err := Transport(&s, log)
	if err != nil {
		return nil, err
	}
	return StartSchedulerOver(tr, s, listen, log)
}

// StartSchedulerOver is StartScheduler over a transport of the caller's.
func StartSchedulerOver(tr transport.Transport, s settings.Settings, listen string, log *zap.Logger) (*Scheduler, error) {
	sched, err := scheduler.New(scheduler.Config{
		Log: log, LostAfter: s.PeerTimeout, Dedicated: s.NumServers, Placement: s.Placement,
	})
	if err != nil {
		return nil, err
	}
	l, err := tr.Listen(listen)
	if err != nil {
		_ = sched.Close()
		return nil, fmt.Errorf("the scheduler cannot listen at %s: %w", listen, err)
	}
	go func() {
		if err := sched.Serve(l); err != nil {
			log.Error("scheduler stopped accepting", zap.Error(err))
		}
	}()
	return &Scheduler{sched, l.Addr().String()}, nil
}
