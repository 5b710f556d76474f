package jobtest_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/transport/transporttest"
)

// TestAServerWithoutASchedulerSaysWhatItWaitsFor every ten seconds; a scheduler that comes then has it.
func TestAServerWithoutASchedulerSaysWhatItWaitsFor(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		said := make(chan string, 100)
		j := jobtest.New(t, 1, network, jobtest.Warnings(said))
		address := j.Scheduler.Address
		j.Scheduler.Close()
		synctest.Wait() // until nobody listens there

		s := j.Settings
		s.Role, s.Scheduler = "server", address
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- node.RunServer(ctx, s, "", node.Options{Log: j.Log, Transports: j.Transports()}) }()
		for range 3 {
			synctest.Wait()
			if len(said) > 0 {
				t.Fatalf("it said too early: %s", <-said)
			}
			time.Sleep(10*time.Second + time.Millisecond)
			synctest.Wait()
			if text := <-said; !strings.Contains(text, "waiting for the scheduler at "+address) {
				t.Fatal(text)
			}
		}
		j.StartScheduler(address)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		if len(said) > 0 {
			t.Errorf("with a scheduler it says %s", <-said)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
