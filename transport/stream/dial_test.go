package stream

import (
	"context"
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/transport"
)

// TestARefusalIsTheReasonHoweverLateItComes where an attempt before it had no answer at all.
func TestARefusalIsTheReasonHoweverLateItComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*firstConnect)
		defer cancel()
		attempts := 0
		_, err := Config{}.Dial(ctx, "there:1", func(connecting context.Context) (net.Conn, error) {
			if attempts++; attempts == 1 {
				<-connecting.Done()
				return nil, connecting.Err()
			}
			<-ctx.Done()
			return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
		})
		if attempts != 2 || !strings.Contains(err.Error(), "2 attempts (context deadline exceeded)") || !strings.HasSuffix(err.Error(), "the last one: dial: connection refused") {
			t.Errorf("%d attempts: %v", attempts, err)
		}
	})
}

// TestARefusalIsTheEndOfAPeerThatListens: where it may start later, it is not.
func TestARefusalIsTheEndOfAPeerThatListens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		attempts := 0
		refuse := func(context.Context) (net.Conn, error) {
			attempts++
			return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := (Config{}).Dial(transport.Listening(ctx), "there:1", refuse); attempts != 1 || !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%d attempts: %v", attempts, err)
		}
		if _, err := (Config{}).Dial(ctx, "there:1", refuse); attempts < 10 || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%d attempts: %v", attempts, err)
		}
	})
}

// TestAnEndByTheDeadlineIsNoReason where an attempt before it has one.
func TestAnEndByTheDeadlineIsNoReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		refused := false
		_, err := Config{}.Dial(ctx, "there:1", func(context.Context) (net.Conn, error) {
			if !refused {
				refused = true
				return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
			}
			<-ctx.Done()
			return nil, ctx.Err()
		})
		if !strings.HasSuffix(err.Error(), "the last one: dial: connection refused") {
			t.Error(err)
		}
	})
}
