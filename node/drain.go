package node

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/server"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

// askTime is how long a server that is told to end waits for the scheduler's word that it may leave empty: another may be leaving.
const askTime = 30 * time.Second

// ErrNotEmpty is the error of a server that was told to end and could not leave an elastic job empty, because it is the last one, for example.
var ErrNotEmpty = errors.New("the server was told to end, and could not leave the job empty: the job has lost it")

// leave has a server leave an elastic job empty, so that nothing is lost, and reports whether it has. told says that it ends in any case.
// A job of fixed members ends with any of them: its server ends at once, and its workers hear that it has shut down.
func leave(told bool, srv *server.Server, line *control.Client, s *settings.Settings, log *zap.Logger) bool {
	if over(srv) || !srv.Elastic() || srv.Alone() && line.Broken() { // also where a launcher was stopped, with its scheduler and all workers
		return false
	}
	ask, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	if err := line.Drain(ask, wire.Drain{}); err != nil {
		if !over(srv) {
			log.Warn("the server cannot leave the job empty", zap.Error(err), zap.Bool("ends all the same", told))
		}
		return false
	}
	began := time.Now()
	srv.Drain()
	said, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	if err := line.Drain(said, wire.Drain{Empty: true}); err != nil {
		log.Warn("the scheduler has not heard that the server is empty: it is lost for the job", zap.Error(err))
		return true
	}
	closed, cancel := context.WithTimeout(context.Background(), s.PeerTimeout)
	defer cancel()
	if srv.Left(closed) != nil {
		log.Warn("some workers have not closed their connections after the goodbye")
	}
	log.Info("the server has left the job empty", zap.Duration("took", time.Since(began)))
	return true
}

// over reports whether the server is in no round whose workers need it.
func over(srv *server.Server) bool {
	select {
	case <-srv.Deserted():
		return true
	default:
		return false
	}
}

// idle reports whether nobody would miss the server: it is in no such round, or no worker of it has a connection to the server.
func idle(srv *server.Server) bool { return over(srv) || srv.Alone() }
