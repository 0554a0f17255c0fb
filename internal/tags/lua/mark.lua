-- Mark tags as invalidated, and tell which of them have an index.
--
-- KEYS  1 book, see note.lua  2.. the index of each tag
-- ARGV  1 a new epoch  2 life of the book, ms  3 life of a mark, ms
--       4 the history of the server's data, or '' if a server that loses the end of it loses values, too
--       5.. the tags
--
-- Returns {known, exists, ...}: known is field k of the book, see note.lua, or '' if an index may have been lost;
--         exists is 0 or 1 for each tag.

local book = KEYS[1]
redis.call('PTTL', book) -- fails before anything is written if live may not use it
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local reply = {}
for i = 2, #KEYS do
  reply[i] = redis.call('EXISTS', KEYS[i])
  local ends = tonumber(redis.call('HGET', book, 't' .. ARGV[3 + i]) or 0)
  if ends > now and reply[i] == 0 then redis.call('UNLINK', book) end
end

local state = redis.call('HMGET', book, 'e', 'k', 'f', 'n')
if not state[1] then redis.call('HSET', book, 'e', ARGV[1]) end
reply[1] = state[1] and state[2] == state[1] .. ' ' .. ARGV[4] and state[2] or ''
local n = math.max(tonumber(state[4] or 0) + 1, tonumber(time[1]) * 1000000 + tonumber(time[2]))
n = string.format('%.0f', n)
redis.call('HSET', book, 'n', n)
local ends = string.format('%.0f', now + tonumber(ARGV[3]))
for i = 2, #KEYS do redis.call('HSET', book, 'm' .. ARGV[3 + i], n .. ' ' .. ends) end
live(book, tonumber(ARGV[2]))
trim(book, now, tonumber(state[3] or 0), #KEYS - 1)
return reply
