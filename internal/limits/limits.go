// Package limits names every bound that Paceline puts on input from outside. A length that comes
// from a network, a file or a user is compared with one of these before memory is taken for it.
package limits

// Sizes in bytes.
const (
	// MaxPayload bounds the payload of one data frame: one partition, or one whole tensor where an
	// operator needs it whole (Adasum).
	MaxPayload = 1 << 30
	// MaxBatch bounds the payloads of the small frames that travel together in a batch.
	MaxBatch = 256 << 10
	// MaxFused bounds the payload of each of them: two of this size share a batch.
	MaxFused = MaxBatch / 2
	// MaxEager bounds the messages between ranks that travel before their receiver has asked for them. Longer ones wait at
	// their sender.
	MaxEager = 64 << 10
	// MaxKeptMessages bounds the bytes of such messages that are kept for one receiver from one sender. What goes beyond
	// it is dropped, and sent again when the receiver asks.
	MaxKeptMessages = 1 << 20
	// MaxControl bounds the JSON payload of one control frame (declarations, rosters, errors).
	MaxControl = 16 << 20
	// MaxPartition bounds the partition size setting.
	MaxPartition = 256 << 20
	// MinPartition is the smallest partition that a tensor is cut into.
	MinPartition = 64 << 10
	// MinRing and MaxRing bound the ring of one direction of a connection in shared memory.
	MinRing = 64 << 10
	MaxRing = 64 << 20
	// MaxShared is beyond which bytes of shared memory a listener's new connections have smaller rings, MinRing at least.
	MaxShared = 256 << 20
	// Arena is the addresses of a process's arena, of which servers of its host map all.
	Arena = 64 << 30
	// MaxStaged bounds what a worker's arena holds of tensors that are on their way to servers of its host and do not lie there.
	MaxStaged = 256 << 20
	// MaxTensor bounds one tensor on one rank.
	MaxTensor = 1 << 40
	// MaxName bounds the name of a tensor.
	MaxName = 4096
	// MaxKept is the number of iterations for which a sum is kept for ranks that it was closed without.
	MaxKept = 64
	// MaxSync bounds the text of a synchronisation model: two expressions and a name.
	MaxSync = 4096
	// MaxCodec bounds the text of a codec.
	MaxCodec = 256
	// MaxPolicy bounds the text of a policy of codecs, and the file that holds one.
	MaxPolicy = 1 << 20
	// MaxSecret bounds the job secret.
	MaxSecret = 4096
	// MaxKey bounds the file of a private key.
	MaxKey = 64 << 10
	// MaxText bounds what a node says for people: why a peer is gone, its host, its release.
	MaxText = 4096
	// MaxAddress bounds one address of a server with the name of its kind.
	MaxAddress = 1024
)

// Counts.
const (
	// MaxChanges bounds the changes of conditions that go with a held value to another server.
	MaxChanges = 16
	// MaxLead bounds how many iterations a push may lie ahead of the open one.
	MaxLead = 1 << 16
	// MaxRanks bounds the number of workers in a job.
	MaxRanks = 1 << 14
	// MaxServers bounds the number of servers in a job.
	MaxServers = 1 << 14
	// MaxAddresses bounds the kinds of transport by which one server is reached.
	MaxAddresses = 8
	// MaxSchedulers bounds the addresses at which a scheduler is looked for.
	MaxSchedulers = 8
	// MaxDims bounds the number of dimensions of a tensor.
	MaxDims = 64
	// MaxTensors bounds how many (name, signature) pairs a job can declare.
	MaxTensors = 1 << 20
	// ManyTensors is when the scheduler warns: a program may use new names in each iteration.
	ManyTensors = 1 << 16
	// MaxNumber bounds the numbers of tensors and of process sets, of which none is used twice in a round.
	MaxNumber = 1 << 31
	// MaxParts bounds how many partitions one tensor is cut into.
	MaxParts = 1 << 20
	// MaxHeard bounds the messages of lost servers that their receivers have had, which a server keeps until their senders have heard of that.
	MaxHeard = 1 << 18
	// RowParts is in how many partitions an allgather of an elastic job travels at most.
	RowParts = 32
	// MaxProcessSets bounds how many process sets a job can hold.
	MaxProcessSets = 1 << 12
	// MaxConnsPerServer bounds the connections that one worker opens to one server.
	MaxConnsPerServer = 64
	// MaxUnproved bounds the connections of one listener that have not proved the job secret. Each costs a goroutine, a
	// file descriptor and a few kilobytes.
	MaxUnproved = 256
	// MaxUnprovedPerSource bounds those of one address, so that places are left for all others.
	MaxUnprovedPerSource = 192
	// MaxExpected bounds the connections for which a listener makes room beyond these, at the start of a large job.
	MaxExpected = 1 << 15
	// MaxRunFile bounds the bytes of the file by which a job is found.
	MaxRunFile = 64 << 10
	// MaxQueries bounds the observers who wait for the status of a job at the same time.
	MaxQueries = 64
	// MaxSamples bounds the workers whose measurements of one server are kept: the mean of so many is exact enough.
	MaxSamples = 256
	// MaxRoundsOver is how many rounds a scheduler remembers that have ended.
	MaxRoundsOver = 1024
	// MaxHandles bounds the operations that one worker can have in flight.
	MaxHandles = 1 << 20
	// MaxBatched bounds the number of frames in a batch.
	MaxBatched = 256
	// MaxAhead bounds how many operations under one name a worker has under way; those after them wait in the worker. It
	// bounds what a server holds for a rank that is ahead of the others, and lies well below condition.MaxLead.
	MaxAhead = 1 << 12
)
