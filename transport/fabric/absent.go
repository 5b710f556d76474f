//go:build !cgo

// Package fabric carries frames through libfabric, in builds with cgo.
package fabric

import (
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/transport"
)

// Kind is the name of the transport in addresses.
const Kind = "fabric"

// Config is common to the connections of one node; other builds use it.
type Config struct {
	Secret           []byte
	Provider         string
	Host             string
	Integrity        string
	HandshakeTimeout time.Duration
	PeerTimeout      time.Duration
	Log              *zap.Logger
}

var errAbsent = errors.New("this build has no cgo, which loading libfabric needs")

// New fails.
func New(Config) (transport.Transport, error) { return nil, errAbsent }

// Device describes one of libfabric's devices.
type Device struct {
	Provider string `json:"provider"`
	Name     string `json:"name"`
}

// Devices fails.
func Devices() ([]Device, error) { return nil, errAbsent }
