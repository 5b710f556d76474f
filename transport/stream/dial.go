package stream

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"time"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
)

// Pauses between attempts to connect double from the first to the last.
const (
	firstPause = 10 * time.Millisecond
	lastPause  = 500 * time.Millisecond
)

// Dial connects and authenticates. The peer may start later, or be starting again: until ctx ends
// Dial retries, unless the address is unusable or the answer comes from a peer without the secret.
func (c Config) Dial(ctx context.Context, address string, connect func(context.Context) (net.Conn, error)) (*Conn, error) {
	c = c.WithDefaults()
	start := time.Now()
	var last error // the last reason other than ctx itself
	pause := firstPause
	for attempts := 1; ; attempts++ {
		conn, err := c.dialOnce(ctx, address, connect)
		if err == nil {
			return conn, nil
		}
		over := expired(ctx)
		switch {
		case !over && final(err):
			return nil, fmt.Errorf("connecting to %s: %w", address, err)
		case !over || last == nil:
			last = err
		}
		timer := time.NewTimer(pause/2 + rand.N(pause/2)) // spread, because all workers of a job start at once
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, fmt.Errorf("connecting to %s: no success in %v and %d attempts (%w); the last one: %w",
				address, time.Since(start).Round(time.Millisecond), attempts, context.Cause(ctx), last)
		}
		pause = min(2*pause, lastPause)
	}
}

func (c Config) dialOnce(ctx context.Context, address string, connect func(context.Context) (net.Conn, error)) (*Conn, error) {
	attempt, cancel := context.WithTimeout(ctx, c.HandshakeTimeout)
	defer cancel()
	nc, err := connect(attempt)
	if err != nil {
		return nil, err
	}
	// The deadline does not cover a cancelled ctx.
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	deadline, _ := attempt.Deadline()
	conn, err := c.authenticate(nc, address, deadline)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		nc.Close()
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
	case errors.Is(err, transport.ErrAuth):
		return !errors.Is(err, auth.ErrInterrupted)
	case errors.As(err, &name):
		return name.IsNotFound
	default:
		return errors.As(err, &address)
	}
}
