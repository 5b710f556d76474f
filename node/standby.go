package node

import (
	"net"

	"go.uber.org/zap"

	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
)

// standby is where a worker of an elastic job is asked for the scheduler when that is missed: its own, which serves nobody before the scheduler is to
// go on in this process, or the one that the process runs already. Where the scheduler is looked for at a list of addresses, it shows that this process lives.
type standby struct {
	own     *Scheduler // nil where the process runs one already
	address string
	log     *zap.Logger
}

// openStandby makes the standby of a worker. running is the address of the scheduler that its process runs, "" for none.
func openStandby(s *settings.Settings, running string, kinds *transport.Set, log *zap.Logger) (*standby, error) {
	if running != "" {
		return &standby{address: running}, nil
	}
	host, err := s.ListenHost()
	if err != nil {
		return nil, err
	}
	own, err := StartScheduler(*s, net.JoinHostPort(host, "0"), Options{Log: log, Transports: kinds, standby: true})
	if err != nil {
		return nil, err
	}
	return &standby{own, own.Address, log}, nil
}

// lead has the scheduler go on here.
func (b *standby) lead() {
	if b.own != nil && b.own.Lead() {
		b.log.Warn("the scheduler is gone: it goes on in this process, of the lowest rank that answers", zap.String("address", b.address))
		b.own.Publish()
	}
}

func (b *standby) close() {
	if b != nil && b.own != nil {
		_ = b.own.Close()
	}
}

// at is the address, "" for none.
func (b *standby) at() string {
	if b == nil {
		return ""
	}
	return b.address
}
