package server

import (
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

func TestAPeerThatAuthenticatesAndSaysNoHelloIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := transporttest.NewNetwork(transporttest.Options{})
		defer network.Close()
		secret := []byte("the secret of this test")
		l, err := network.Node("server", secret).Listen("server:1")
		if err != nil {
			t.Fatal(err)
		}
		s := New(Config{Log: zap.NewNop(), Memory: 1 << 20})
		defer s.Close()
		defer l.Close()
		go func() { _ = s.Serve(l) }()
		conn, err := network.Node("worker", secret).Dial(t.Context(), "server:1")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		start := time.Now()
		var h wire.Header
		if err := conn.ReadHeader(&h); err == nil {
			t.Errorf("the server answers with a %v frame", h.Type)
		}
		if took := time.Since(start); took > 35*time.Second {
			t.Errorf("it was closed after %v", took)
		}
	})
}
