package node

import (
	"fmt"

	"go.uber.org/zap"

	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/shm"
)

// backend makes the transport of one kind as the settings say. It returns nil where the settings exclude the kind, for
// example an unencrypted one where they ask for TLS, or where the machine does not have it.
type backend func(s *settings.Settings, arena *shm.Arena, log *zap.Logger) (transport.Transport, error)

// backends are the kinds of transport, in a process's order of preference. The last is the one that every process has.
var backends = []backend{overSharedMemory, overFabric, overTCP}

// wants reports whether a process has a transport of a kind that has no encryption, where the machine has it.
func wants(s *settings.Settings, kind string) bool {
	local := s.Transport == "local" && kind == shm.Kind
	return (s.Transport == "auto" || s.Transport == kind || local) && s.TLSCert == ""
}

// optional is a transport that a machine may lack: that is an error where the settings ask for the kind by name. instead says
// what is used otherwise, by say.
func optional(s *settings.Settings, say func(string, ...zap.Field), kind, instead string, t transport.Transport, err error) (transport.Transport, error) {
	if err != nil && s.Transport == kind {
		return nil, fmt.Errorf("PACELINE_TRANSPORT=%s: %w", kind, err)
	}
	if err != nil {
		say(instead, zap.Error(err))
		return nil, nil
	}
	return t, nil
}

// Transports makes the transports of a process that lends no memory.
func Transports(s *settings.Settings, log *zap.Logger) (*transport.Set, error) {
	return transports(s, nil, log)
}

func transports(s *settings.Settings, arena *shm.Arena, log *zap.Logger) (*transport.Set, error) {
	var kinds []transport.Transport
	for _, b := range backends {
		t, err := b(s, arena, log)
		if err != nil {
			return nil, err
		}
		if t != nil {
			kinds = append(kinds, t)
		}
	}
	return transport.NewSet(log, kinds...), nil
}
