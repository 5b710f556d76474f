//go:build !cgo

// Package fabric carries frames through libfabric, in builds with cgo.
package fabric

import (
	"errors"

	"github.com/paceline/paceline/transport"
)

var errAbsent = errors.New("this build has no cgo, which loading libfabric needs")

// New fails.
func New(Config) (transport.Transport, error) { return nil, errAbsent }

// Devices fails.
func Devices() ([]Device, error) { return nil, errAbsent }
