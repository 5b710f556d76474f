package jobtest_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/fabric"
)

// TestRanksTrainOverAFabric: two ranks with the same provider of libfabric exchange tensors by it, small and large ones; a third
// one without it reaches both by TCP.
func TestRanksTrainOverAFabric(t *testing.T) {
	for _, provider := range []string{"tcp;ofi_rxm", "shm"} {
		t.Run(provider, func(t *testing.T) {
			if _, err := fabric.New(fabric.Config{Provider: provider}); err != nil {
				t.Skipf("libfabric or its provider is not on this machine: %v", err)
			}
			t.Cleanup(func() { // the provider shm leaves what it shares
				left, _ := filepath.Glob(fmt.Sprintf("/dev/shm/%d:*", os.Getpid()))
				for _, path := range left {
					os.Remove(path)
				}
			})
			core, logged := observer.New(zap.DebugLevel)
			var j *jobtest.Job
			of := func(rank int) *transport.Set {
				s := j.Settings
				s.Transport, s.Fabric = "fabric", provider
				if rank != 0 && rank != 1 {
					s.Transport = "tcp"
				}
				set, err := node.Transports(&s, zap.New(core))
				if err != nil {
					t.Error(err)
				}
				return set
			}
			j = jobtest.Start(t, 3, func(job *jobtest.Job) { j = job }, jobtest.Transports(of))
			j.Works("small", 100)
			j.Works("large", 3_000_000)
			chosen := map[string]int{}
			for _, e := range logged.FilterMessage("connected").All() {
				chosen[e.ContextMap()["kind"].(string)]++
			}
			if chosen[fabric.Kind] != 2 || chosen["tcp"] != 4 {
				t.Errorf("connections between ranks by kind: %v, want 2 over the fabric and 4 over TCP", chosen)
			}
		})
	}
}
