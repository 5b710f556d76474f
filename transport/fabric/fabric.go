//go:build cgo

// Package fabric carries frames over adapters that read and write memory by themselves (RDMA), through libfabric, which is loaded when
// the first transport is made. A machine without it has no such transport; building needs nothing of it.
//
// A connection runs between the endpoints (reliable datagrams) of two processes, and has a TCP connection beside it:
//
//  1. The side connection comes first. It carries the handshake (package auth), so that nothing is opened for a peer without the secret, and then the
//     endpoints' names. Afterwards it is silent, and ends with the process at its other end: that is how a killed peer is noticed.
//     A stopped one is noticed by the beats of package stream, which come by the fabric as all frames do.
//  2. What is small is copied into messages. Their memory is posted at the receiver, which gives credit for it.
//  3. What is large stays where it is: the sender says where, and the receiver reads it from there straight into the memory
//     of its caller, for example a tensor. A write by one side (transport.OneSided) is the same with memory that was granted:
//     its owner checks the token, then reads. So no peer writes into a process, and what a released region or a closed
//     connection promises depends on nobody else.
//  4. The connections of a process share one endpoint: each would cost memory, and some adapters have few. Messages begin with the random
//     key of their connection. Until the endpoint is closed, an adapter may touch the memory of operations that have failed: a peer that
//     neither answers nor dies costs the endpoint, and all connections on it.
//
// A goroutine of the device handles what has ended on its endpoint. It sleeps until the provider says that something has, or, where
// it cannot, for times that double while nothing has. Decision 63 has the reasons.
package fabric

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/paceline/paceline/internal/forked"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/stream"
)

// network is the transport of one node over one device.
type network struct {
	host     string
	patience time.Duration
	stream   stream.Config
	device   func() (*device, error) // opens it at its first use
}

// New chooses a device. It is an error where libfabric is not installed or has none. The device is opened when there is something to do.
func New(config Config) (transport.Transport, error) {
	n := &network{host: config.Host, stream: stream.Config{
		Secret: config.Secret, HandshakeTimeout: config.HandshakeTimeout, PeerTimeout: config.PeerTimeout, Integrity: config.Integrity, Log: config.Log,
	}.WithDefaults()}
	n.patience = stream.Silence(n.stream.PeerTimeout)
	n.stream.Carrier, n.stream.Offer = n.carry, withWrites
	host, _ := netip.ParseAddr(config.Host) // a device need not have an internet address
	chosen := func(use func(offer) error) error {
		return find(config.Provider, func(all []offer) error {
			o, err := choose(all, config.Provider, host)
			if err != nil {
				return err
			}
			return use(o)
		})
	}
	n.device = sync.OnceValues(func() (d *device, err error) {
		err = chosen(func(o offer) (err error) {
			d, err = o.open()
			return err
		})
		return d, err
	})
	if err := chosen(func(offer) error { return nil }); err != nil {
		return nil, err
	}
	return n, nil
}

// Devices lists the devices of this machine by which connections are possible, each once.
func Devices() ([]Device, error) {
	var list []Device
	seen := map[Device]bool{}
	err := find("", func(all []offer) error {
		for _, o := range all {
			if d := (Device{o.provider, o.device}); !seen[d] {
				seen[d] = true
				list = append(list, d)
			}
		}
		return nil
	})
	return list, err
}

// Kind implements transport.Transport.
func (n *network) Kind() string { return Kind }

// keepAlive finds hosts that are down. That a process is stopped the beats show.
func (n *network) keepAlive() net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: n.stream.PeerTimeout / 2, Interval: max(n.stream.PeerTimeout/5, time.Second), Count: 3}
}

// Listen implements transport.Transport. An address is that of the side connection, "host:port".
func (n *network) Listen(address string) (transport.Listener, error) {
	if address == "" {
		address = net.JoinHostPort(n.host, "0")
	}
	if _, err := n.device(); err != nil {
		return nil, err
	}
	config := net.ListenConfig{KeepAliveConfig: n.keepAlive()}
	config.SetMultipathTCP(false)
	l, err := config.Listen(context.Background(), "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", address, err)
	}
	return n.stream.Listen(sides{l}), nil
}

// Dial implements transport.Transport.
func (n *network) Dial(ctx context.Context, address string) (transport.Conn, error) {
	if _, err := n.device(); err != nil { // now, because a handshake has little time
		return nil, err
	}
	dialer := net.Dialer{KeepAliveConfig: n.keepAlive()}
	dialer.SetMultipathTCP(false)
	return n.stream.Dial(ctx, address, func(ctx context.Context) (net.Conn, error) {
		nc, err := dialer.DialContext(ctx, "tcp", address)
		if err != nil {
			return nil, err
		}
		return newSide(nc), nil
	})
}

// sides is the listening socket of side connections.
type sides struct{ net.Listener }

func (l sides) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return newSide(nc), nil
}

func (l sides) Addr() net.Addr { return address{l.Listener.Addr()} }

// Unwrap implements stream.Wrapper.
func (l sides) Unwrap() net.Listener { return l.Listener }

// side is a side connection, whose addresses are those of the transport.
type side struct{ net.Conn }

func newSide(nc net.Conn) side {
	if c, ok := nc.(*net.TCPConn); ok {
		forked.Note(c)
	}
	return side{nc}
}

func (s side) LocalAddr() net.Addr  { return address{s.Conn.LocalAddr()} }
func (s side) RemoteAddr() net.Addr { return address{s.Conn.RemoteAddr()} }

// Close implements net.Conn.
func (s side) Close() error {
	if c, ok := s.Conn.(*net.TCPConn); ok {
		return forked.Close(c)
	}
	return s.Conn.Close()
}

type address struct{ net.Addr }

func (address) Network() string { return Kind }
