package jobtest_test

import (
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
)

// TestRanksWithDifferentTransportsTrainTogether: the first two ranks have an optional kind and use it between them; with the
// third all use the required kind.
func TestRanksWithDifferentTransportsTrainTogether(t *testing.T) {
	core, logged := observer.New(zap.DebugLevel)
	var kinds []transport.Transport
	for _, kind := range []string{"near", "everywhere"} {
		network := transporttest.NewNetwork(transporttest.Options{Kind: kind})
		t.Cleanup(network.Close)
		kinds = append(kinds, network.Node("127.0.0.1", []byte(jobtest.Secret)))
	}
	j := jobtest.Start(t, 3, jobtest.Transports(func(rank int) *transport.Set {
		if rank == 0 || rank == 1 {
			return transport.NewSet(zap.New(core), kinds...)
		}
		return transport.NewSet(zap.New(core), kinds[1])
	}))
	j.Works("gradient", 100_000)
	chosen := map[string]int{}
	for _, e := range logged.FilterMessage("connected").All() {
		chosen[e.ContextMap()["kind"].(string)]++
	}
	if chosen["near"] != 2 || chosen["everywhere"] != 4 {
		t.Errorf("connections between ranks by kind: %v, want 2 near and 4 everywhere", chosen)
	}
}
