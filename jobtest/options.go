package jobtest

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
)

// Option changes a job before it starts.
type Option func(*Job)

// Embedded has the servers in the workers, as without an option.
func Embedded(*Job) {}

// Dedicated has n dedicated servers and none in the workers.
func Dedicated(servers int) Option {
	return func(j *Job) { j.Settings.Servers, j.Settings.NumServers = "dedicated", servers }
}

// Both has n dedicated servers beside those in the workers.
func Both(servers int) Option {
	return func(j *Job) { j.Settings.Servers, j.Settings.NumServers = "both", servers }
}

// Elastic has the job go on without workers and servers that are lost.
var Elastic = With(func(s *settings.Settings) { s.Elastic = true })

// With changes settings of all processes.
func With(change func(*settings.Settings)) Option { return func(j *Job) { change(&j.Settings) } }

// OnHosts gives each worker the name of its host; the servers' is another.
func OnHosts(of func(rank int) string) Option { return func(j *Job) { j.host = of } }

// Pairs has n dedicated servers, and two workers on each of the other hosts: these sum among themselves first.
func Pairs(servers int) Option {
	return func(j *Job) {
		Dedicated(servers)(j)
		OnHosts(pairOf)(j)
	}
}

func pairOf(rank int) string { return fmt.Sprint("pair-", rank/2) }

// SmallPartitions cuts tensors into as many partitions as possible.
var SmallPartitions = With(func(s *settings.Settings) { s.PartitionBytes = Partition })

// Partition is the partition size of SmallPartitions in bytes.
const Partition = 64 << 10

// InMemory runs the job over the twin of a network in memory, as one node.
func InMemory(t testing.TB) Option { return Over(t, transporttest.Options{}) }

// Over is InMemory with links of some latency, bandwidth or faults.
func Over(t testing.TB, links transporttest.Options) Option {
	network := transporttest.NewNetwork(links)
	t.Cleanup(network.Close)
	set := transport.NewSet(nil, network.Node("127.0.0.1", []byte(Secret)))
	return Transports(func(int) *transport.Set { return set })
}

// Transports gives each worker its own transports; rank -1 is for those of servers and the scheduler.
func Transports(of func(rank int) *transport.Set) Option { return func(j *Job) { j.over = of } }

// ServerTransports gives each dedicated server its own transports.
func ServerTransports(of func(i int) *transport.Set) Option {
	return func(j *Job) { j.overServer = of }
}

// Virtually runs a test in virtual time: its jobs have the network of the option that it is given, and time passes only
// while every goroutine waits.
func Virtually(t *testing.T, links transporttest.Options, test func(t *testing.T, network Option)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(t, Over(t, links)) })
}

// Stalls sets the times after which a rank that does not come is reported and the operation ended.
func Stalls(warning, shutdown time.Duration) Option {
	return With(func(s *settings.Settings) { s.StallWarning, s.StallShutdown = warning, shutdown })
}

// CodedBy are the rules by which a codec codes each tensor, however small.
func CodedBy(setting string) string {
	return fmt.Sprintf(`[{"min_bytes": 0, "codec": %q}]`, setting)
}
