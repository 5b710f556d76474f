package node

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"strconv"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/internal/iface"
	"github.com/paceline/paceline/node/settings"
)

// profilePorts is how many ports a process tries, from the one in PACELINE_PPROF on: all processes of a job on one
// host have the same setting.
const profilePorts = 256

// profiles is the endpoint of net/http/pprof in one process.
type profiles struct {
	http http.Server
	url  string
}

// openProfiles opens the endpoint that PACELINE_PPROF asks for, and says its address. It returns nil where none is asked for.
func openProfiles(s *settings.Settings, log *zap.Logger) (*profiles, error) {
	if s.Pprof == "" {
		return nil, nil
	}
	l, err := listenProfiles(s.Pprof)
	if err != nil {
		return nil, fmt.Errorf("PACELINE_PPROF=%s: %w", s.Pprof, err)
	}
	pages := http.NewServeMux()
	pages.HandleFunc("/debug/pprof/", pprof.Index)
	pages.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	pages.HandleFunc("/debug/pprof/profile", pprof.Profile)
	pages.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	pages.HandleFunc("/debug/pprof/trace", pprof.Trace)
	p := &profiles{url: "http://" + l.Addr().String() + "/debug/pprof/"}
	p.http = http.Server{Handler: fromHere(pages), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 10 * time.Second}
	go func() {
		if err := p.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("the pprof endpoint has stopped", zap.Error(err))
		}
	}()
	log.Warn("every user of this machine can read profiles of this process", zap.String("at", p.url))
	return p, nil
}

// listenProfiles listens at host:port, or at the next port that is free.
func listenProfiles(address string) (net.Listener, error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	first, err := strconv.Atoi(text)
	if err != nil {
		return nil, err
	}
	for port := first; ; port++ {
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil || !errors.Is(err, syscall.EADDRINUSE) || port == min(first+profilePorts, 65535) {
			return l, err
		}
	}
}

// fromHere answers only requests that name this machine: a page of another site in a browser here may have its own name
// lead to this address.
func fromHere(pages http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if host, _, err := net.SplitHostPort(r.Host); err != nil || !iface.IsLoopback(host) {
			http.Error(w, "ask for 127.0.0.1 or localhost", http.StatusForbidden)
			return
		}
		pages.ServeHTTP(w, r)
	})
}

func (p *profiles) close() {
	if p != nil {
		_ = p.http.Close()
	}
}
