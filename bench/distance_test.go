package bench

import (
	"bytes"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/redistest"
)

// BenchmarkDistance measures hits and misses where each round trip takes half a millisecond longer
// than on one machine, as between two machines of one data centre.
func BenchmarkDistance(b *testing.B) {
	const far = 500 * time.Microsecond
	b.Run("round_trip/PING", func(b *testing.B) { roundTrips(b, far) })
	b.Run("hit,_serial/2KB", func(b *testing.B) { serialHits(b, distant(b, redistest.Start(b), far), 2<<10) })
	b.Run("hit,_64_goroutines/64_keys,_2KB", func(b *testing.B) {
		parallelHits(b, distant(b, redistest.Start(b), far), 64, 2<<10)
	})
	b.Run("miss,_serial/2KB", func(b *testing.B) { misses(b, distant(b, redistest.Start(b), far), 0, 2<<10) })
}

// roundTrips shows the distance itself.
func roundTrips(b *testing.B, far time.Duration) {
	s, ctx := redistest.Start(b), request(b)
	ping := func(name string, rdb *redis.Client) contender {
		return contender{name, func(int) error { return rdb.Ping(ctx).Err() }}
	}
	race{ops: 100, bases: []string{"near"}, contenders: []contender{
		ping("near", open(b, s.Addr)), ping("distant", open(b, distant(b, s, far))),
	}}.run(b)
}

const distanceRole = "distance"

func init() { redistest.Role(distanceRole, runDistance) }

// distant returns another address of the server, at which each round trip takes longer by
// roundTrip. A separate process forwards the bytes. The time that it takes is measured first, and
// the delay is shorter by that.
func distant(b *testing.B, s *redistest.Server, roundTrip time.Duration) string {
	at := func(delay time.Duration) string {
		return redistest.Spawn(b, distanceRole, s.Addr, delay.String()).Expect("at ")
	}
	longer := pinged(b, at(roundTrip/2)) - pinged(b, s.Addr)
	return at(max(0, roundTrip/2-(longer-roundTrip)/2))
}

// pinged returns how long a PING takes.
func pinged(b *testing.B, addr string) time.Duration {
	rdb, ctx := open(b, addr), request(b)
	var took []float64
	for range 300 {
		begun := time.Now()
		must(rdb.Ping(ctx).Result())
		took = append(took, float64(time.Since(begun)))
	}
	return time.Duration(Median(took))
}

func runDistance(p *redistest.Child) {
	target, delay := p.Args[0], must(time.ParseDuration(p.Args[1]))
	stayAwake()
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	p.Say("at %s", l.Addr())
	for {
		client := must(l.Accept())
		server := must(net.Dial("tcp", target))
		go forward(server, client, delay)
		go forward(client, server, delay)
	}
}

// forward writes what it reads to another connection, delay after it was read. It reads on in the
// meantime, so the delay does not limit the throughput.
func forward(to, from net.Conn, delay time.Duration) {
	type piece struct {
		data []byte
		due  time.Time
	}
	line := make(chan piece, 1024)
	go func() {
		defer close(line)
		buffer := make([]byte, 64<<10)
		for {
			n, err := from.Read(buffer)
			if err != nil {
				return
			}
			line <- piece{slices.Clone(buffer[:n]), time.Now().Add(delay)}
		}
	}()
	a := newAlarm()
	defer a.close()
	defer to.Close()
	for p := range line {
		a.sleep(time.Until(p.due))
		if _, err := to.Write(p.data); err != nil {
			_ = from.Close() // which ends the line
		}
	}
}

// What is forwarded arrives unchanged, and not before its delay.
func TestForward(t *testing.T) {
	const delay = 3 * time.Millisecond
	in, from := net.Pipe()
	to, out := net.Pipe()
	go forward(to, from, delay)
	sent := make([]byte, 1<<20)
	for i := range sent {
		sent[i] = byte(i * i >> 8)
	}
	begun := time.Now()
	go func() {
		_, _ = in.Write(sent)
		_ = in.Close()
	}()
	first := make([]byte, 1)
	if _, err := io.ReadFull(out, first); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begun); took < delay {
		t.Errorf("the first byte took %v", took)
	}
	if rest, err := io.ReadAll(out); err != nil || !bytes.Equal(append(first, rest...), sent) {
		t.Errorf("%d of %d bytes, or other ones; %v", 1+len(rest), len(sent), err)
	}
}
