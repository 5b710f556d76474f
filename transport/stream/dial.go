package stream

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
)

// Pauses between attempts to connect double from the first to the last, or to a shorter one where the peer answers but
// ended the handshake: it may have dropped this node for other connections, and another attempt has a new chance.
const (
	firstPause   = 10 * time.Millisecond
	lastPause    = 500 * time.Millisecond
	droppedPause = 50 * time.Millisecond
	// firstConnect is how long the first attempt waits for the stream; the next ones wait twice as long each. A kernel
	// whose backlog is full drops the request to connect, and ours repeats it only after a second.
	firstConnect = 250 * time.Millisecond
)

// Dial connects and authenticates. The peer may start later, or be starting again: until ctx ends
// Dial retries, unless the address is unusable, the answer comes from a peer without the secret, ctx is of transport.Once, or the peer has ended (transport.Listening).
func (c Config) Dial(ctx context.Context, address string, connect func(context.Context) (net.Conn, error)) (transport.Conn, error) {
	c = c.WithDefaults()
	start := time.Now()
	var last error // the last reason other than ctx itself
	pause, patience := firstPause, min(firstConnect, c.HandshakeTimeout)
	if transport.IsOnce(ctx) {
		patience = c.HandshakeTimeout
	}
	for attempts := 1; ; attempts++ {
		conn, err := c.dialOnce(ctx, address, patience, connect)
		if err == nil {
			return c.offer(conn), nil
		}
		over := expired(ctx)
		switch {
		case !over && final(err), transport.IsOnce(ctx), transport.IsListening(ctx) && errors.Is(err, syscall.ECONNREFUSED):
			return nil, fmt.Errorf("connecting to %s: %w", address, err)
		case !over || last == nil || errors.Is(err, syscall.ECONNREFUSED):
			last = err // an answer of the peer's host counts whenever it comes
		}
		if errors.Is(err, auth.ErrInterrupted) && !errors.Is(err, os.ErrDeadlineExceeded) {
			pause = min(pause, droppedPause)
		}
		select {
		case <-time.After(pause/2 + rand.N(pause/2)): // spread, because all workers of a job start at once
		case <-ctx.Done():
			return nil, fmt.Errorf("connecting to %s: no success in %v and %d attempts (%w); the last one: %w",
				address, time.Since(start).Round(time.Millisecond), attempts, context.Cause(ctx), last)
		}
		pause, patience = min(2*pause, lastPause), min(2*patience, c.HandshakeTimeout)
	}
}

// dialOnce is one attempt: patience is for the stream, the time of the handshake follows.
func (c Config) dialOnce(ctx context.Context, address string, patience time.Duration, connect func(context.Context) (net.Conn, error)) (*Conn, error) {
	attempt, cancel := context.WithTimeout(ctx, c.HandshakeTimeout)
	defer cancel()
	connecting, stopConnecting := context.WithTimeout(attempt, patience)
	nc, err := connect(connecting)
	stopConnecting()
	if err != nil {
		return nil, err
	}
	// The deadline does not cover a cancelled ctx.
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	deadline, _ := attempt.Deadline()
	conn, err := c.authenticate(nc, address, deadline, nil)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		nc.Close()
		if conn != nil {
			conn.Close()
		}
		return nil, err
	}
	return conn, nil
}

// expired reports whether ctx has ended or is at its deadline, which a network operation may see first.
func expired(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(deadline)
}

// final reports whether another attempt would end the same.
func final(err error) bool {
	var address *net.AddrError
	var name *net.DNSError
	switch {
	case errors.Is(err, errCarrier):
		return !errors.Is(err, auth.ErrInterrupted)
	case errors.Is(err, transport.ErrAuth):
		return auth.Refused(err)
	case errors.As(err, &name):
		return name.IsNotFound
	default:
		return errors.As(err, &address)
	}
}
